"""A GPU that PyTorch cannot use is named with the way out, and only where there is one."""

import pytest
import torch

from unirl.testing.second_device import second_devices
from unirl.types import device

VERSION = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
GCC version:  gcc version 12.3.0
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an NVIDIA GPU, and a torch that cannot use it."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(device, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_gpu_that_torch_cannot_use_is_named_with_both_versions_and_the_ways_out(machine) -> None:
    why = device.unusable_gpu() or ""
    assert "driver 535.183.01" in why and "for CUDA 13.0" in why and "CUDA_VISIBLE_DEVICES=-1" in why


def test_a_build_without_cuda_is_said_to_be_one(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in (device.unusable_gpu() or "")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_who_hides_the_gpus_has_chosen_the_cpu(machine, monkeypatch, hidden) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert device.unusable_gpu() is None


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("", "It is empty"),
        ("0,8", "There is no GPU 8 (the machine has 0 to 7)"),
        ("0,1,0", "It names 0 twice"),
        ("GPU-5e1f,GPU-5e1f", "It names GPU-5e1f twice"),
        ("0,,1", "'' is neither the index nor the UUID"),
        ("NoDevFiles", "'NoDevFiles' is neither the index nor the UUID"),
        ("MIG-a1,MIG-b2", "only the first of several MIG instances"),
    ],
)
def test_a_setting_that_hides_gpus_silently_is_explained(setting, says) -> None:
    assert says in (device.visibility_problem(setting, 8) or "")


@pytest.mark.parametrize("setting", ["0", "7,0", " 0, 1", "GPU-5e1f,GPU-77aa", "MIG-a1", "-1", "0,-1,9"])
def test_a_setting_that_cuda_takes_has_no_problem(setting) -> None:
    assert device.visibility_problem(setting, 8) is None


def test_where_the_number_of_gpus_is_unknown_no_index_is_wrong() -> None:
    assert device.visibility_problem("0,8", 0) is None


def test_an_index_that_no_gpu_has_is_blamed_before_the_driver(machine, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    why = device.unusable_gpu() or ""
    assert "CUDA_VISIBLE_DEVICES=3 hides the GPUs" in why and "There is no GPU 3" in why and "driver" not in why


def test_functions_for_any_device_take_emulated_devices_and_the_cpu() -> None:
    assert (device.num_accelerators(), device.capability(device.CPU)) == (0, None)
    device.select(device.CPU)
    device.synchronize(device.CPU)
    with second_devices(2) as devices:
        second = device.accelerator(1)
        assert (device.num_accelerators(), device.capability(second)) == (2, None)
        device.select(second)
        assert torch.get_device_module(second).current_device() == 1
        waits = devices.syncs.total()
        device.synchronize(second)
        assert devices.syncs.total() == waits + 1
        device.select(device.accelerator(0))


def test_a_machine_without_a_gpu_or_with_one_that_works_is_left_alone(machine, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.unusable_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (machine / "nvidia0").unlink()
    assert device.unusable_gpu() is None
