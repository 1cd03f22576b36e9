"""A machine that shows too few GPUs, or GPUs that are too small, is refused before a process starts."""

from __future__ import annotations

import pytest
import torch

from unirl.cli.check import checked
from unirl.config.errors import MemoryShortageError, ResourceError, UnsupportedEnvironmentError
from unirl.config.load import load
from unirl.plan.fit import device_peaks, moment_peaks
from unirl.plan.machine import check_machine, check_memory, hidden_devices
from unirl.plan.sizes import RecipeSizes
from unirl.testing.second_device import second_devices
from unirl.types import device
from unirl.types.device import DeviceKind

RECIPE = "diffusion/sd3_trainside"
SEPARATE = "diffusion/sd3_replica_lora_separate"
EIGHT = ("num_devices=8", "placement={train: 0-3, rollout: 4-7}")


@pytest.fixture
def eight_gpus(tmp_path, monkeypatch):
    """A machine with eight GPUs. The emulated devices are those that the process sees."""
    for index in range(8):
        (tmp_path / f"nvidia{index}").touch()
    monkeypatch.setattr(device, "DEVICE_FILES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def config(recipe, *words):
    return load(recipe, words).config


def sizes(recipe, *words):
    return RecipeSizes(config(recipe, *words))


def test_fewer_gpus_than_the_recipe_needs_are_counted_by_role_with_the_ways_out(eight_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with second_devices(4):
        message = hidden_devices(config(SEPARATE, *EIGHT)) or ""
    assert "needs 8 GPUs" in message and "train on devices 0-3, rollout and reward on devices 4-7" in message
    assert "this process sees 4 of 8 with CUDA_VISIBLE_DEVICES=0,1,2,3." in message
    assert "Show 8 GPUs with CUDA_VISIBLE_DEVICES, or set num_devices=4, or CUDA_VISIBLE_DEVICES=-1" in message


@pytest.mark.parametrize(
    ("setting", "seen", "says"),
    [
        ("", 0, "It is empty, which hides all GPUs."),
        ("0,1,0,2,3,4,5,6", 0, "It names 0 twice, which hides all GPUs."),
        ("0,1,9,2,3,4,5,6", 2, "There is no GPU 9 (the machine has 0 to 7)"),
    ],
)
def test_a_setting_that_cuda_takes_silently_is_explained(eight_gpus, monkeypatch, setting, seen, says):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    if seen == 0:
        message = hidden_devices(config(SEPARATE, *EIGHT)) or ""
    else:
        with second_devices(seen):
            message = hidden_devices(config(SEPARATE, *EIGHT)) or ""
    assert says in message and f"CUDA_VISIBLE_DEVICES={setting}." in message


def test_what_a_container_got_is_named(eight_gpus, monkeypatch, tmp_path):
    for index in range(2, 8):
        (tmp_path / f"nvidia{index}").unlink()
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "0,1")
    with second_devices(2):
        message = hidden_devices(config(SEPARATE, *EIGHT)) or ""
    assert "sees 2 with NVIDIA_VISIBLE_DEVICES=0,1. Set num_devices=2" in message


def test_a_machine_that_shows_enough_or_has_none_is_left_alone(eight_gpus, monkeypatch, tmp_path):
    with second_devices(8):
        assert hidden_devices(config(SEPARATE, *EIGHT)) is None
    with second_devices(1):
        assert hidden_devices(config(SEPARATE, *EIGHT, "devices_per_node=1")) is None
        assert hidden_devices(config(SEPARATE, "runtime=local", "scale=toy")) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert hidden_devices(config(SEPARATE, *EIGHT)) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hidden_devices(config(SEPARATE, *EIGHT, "scale=toy")) is None
    for file in tmp_path.iterdir():
        file.unlink()
    assert hidden_devices(config(SEPARATE, *EIGHT)) is None


def test_the_check_refuses_and_leaves_a_cluster_elsewhere_to_ray(eight_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with second_devices(4):
        with pytest.raises(ResourceError, match="sees 4 of 8") as refused:
            check_machine(sizes(SEPARATE, *EIGHT), pytest.fail)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        check_machine(sizes(SEPARATE, *EIGHT), pytest.fail)
    assert refused.value.code == 5001


def test_a_gpu_that_torch_cannot_use_stops_a_run_and_warns_a_toy(eight_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedEnvironmentError, match="cannot use it") as refused:
        check_machine(sizes(RECIPE), pytest.fail)
    warnings: list[str] = []
    check_machine(sizes(RECIPE, "scale=toy"), warnings.append)
    assert len(warnings) == 1 and "cannot use it" in warnings[0] and refused.value.code == 3002


def test_the_largest_of_several_devices_decides(eight_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kinds = {0: DeviceKind(name="small", memory_gib=4.0), 1: DeviceKind(name="large", memory_gib=80.0)}
    monkeypatch.setattr("unirl.plan.machine.device_kind", lambda place: kinds[place.index])
    with second_devices(2):
        check_machine(sizes(RECIPE, "num_devices=2"), pytest.fail)
        kinds[1] = kinds[0]
        with pytest.raises(MemoryShortageError, match=r"small has 4.0 GiB"):
            check_machine(sizes(RECIPE, "num_devices=2"), pytest.fail)


@pytest.mark.slow
def test_a_device_that_is_too_small_is_refused_by_how_much_with_settings_that_fit(eight_gpus):
    small = DeviceKind(name="NVIDIA GeForce RTX 4090", memory_gib=24.0)
    with pytest.raises(MemoryShortageError, match=r"RTX 4090 has 24.0 GiB, of which 22.1 .* GiB too much") as refused:
        check_memory(sizes(RECIPE), small, pytest.fail)
    words = str(refused.value).rpartition("These settings fit: ")[2].partition(". Plans are counted")[0].split()
    warnings: list[str] = []
    check_memory(sizes(RECIPE, "memory_check=warn"), small, warnings.append)
    assert words and len(warnings) == 1
    check_memory(sizes(RECIPE, *words), small, pytest.fail)


def test_a_device_set_of_a_cluster_is_compared_with_its_own_part_of_the_plan():
    recipe = sizes(SEPARATE, *EIGHT)
    run = recipe.run
    peaks = {devices: max(moments.values()) for devices, moments in device_peaks(run, run.settings).items()}
    assert max(peaks.values()) == max(moment_peaks(run, run.settings).values())
    (low, least), (high, most) = sorted(peaks.items(), key=lambda item: item[1])
    between = DeviceKind(name="a GPU", memory_gib=(least / 0.92 + most / 1.1) / 2)
    assert least / 0.92 < most / 1.1
    check_memory(recipe, between, pytest.fail, low)
    with pytest.raises(MemoryShortageError, match=f"peak is {most:.1f} GiB"):
        check_memory(recipe, between, pytest.fail, high)


def test_a_peak_within_the_error_of_a_plan_is_a_warning_and_what_nothing_fits_is_said(eight_gpus):
    warnings: list[str] = []
    check_memory(sizes(RECIPE), DeviceKind(name="a GPU", memory_gib=27.0), warnings.append)
    assert len(warnings) == 1 and "a GPU has 27.0 GiB" in warnings[0]
    check_memory(sizes(RECIPE), DeviceKind(name="NVIDIA H200", memory_gib=140.0), pytest.fail)
    with pytest.raises(MemoryShortageError, match=r"The smallest settings need .* GiB .*more or larger devices"):
        check_memory(sizes(RECIPE), DeviceKind(name="a GPU", memory_gib=4.0), pytest.fail)


def test_check_says_that_a_run_would_be_refused_here(eight_gpus, capsys):
    with second_devices(4):
        checked(SEPARATE, EIGHT)
    assert "a run would be refused here: the run needs 8 GPUs" in capsys.readouterr().err
