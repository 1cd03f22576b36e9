"""What the doctor says of GPUs, of the room for a recipe, and of what a run would download."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from unirl.cli import doctor
from unirl.cli.main import main
from unirl.config.errors import NotFoundError
from unirl.models.loading import hub
from unirl.plan import threads
from unirl.testing.second_device import second_devices
from unirl.types import device

RECIPE = "diffusion/sd3_trainside"


@pytest.fixture(autouse=True)
def healthy(monkeypatch, tmp_path):
    """The checks of the machine itself are not the subject here, and the machine has no device files."""
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(device, "DEVICE_FILES", tmp_path)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RAY_ADDRESS", "PRETRAINED_MODEL"):
        monkeypatch.delenv(name, raising=False)


def said(capsys, *words: str, status: int = 0) -> dict[str, tuple[bool, str]]:
    assert main(["doctor", *words, "--json"]) == status
    return {row["check"]: (row["ok"], row["detail"]) for row in json.loads(capsys.readouterr().out)}


def test_each_gpu_has_a_line_with_its_memory_and_what_is_free(capsys, monkeypatch):
    monkeypatch.setattr(device, "nccl_version", lambda: "2.27.3")
    monkeypatch.setattr(device, "without_peer_access", lambda: [(0, 1), (1, 0)])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with second_devices(2) as devices:
        devices.memory = 24 * 2**30
        devices.allocated[1] = 6 * 2**30
        rows = said(capsys)
    assert rows == {
        "gpu 0": (True, "emulated, 24.0 GiB; 24.0 GiB free"),
        "gpu 1": (True, "emulated, 24.0 GiB; 18.0 GiB free"),
        "gpus": (
            True,
            "NCCL 2.27.3, no peer access between 0-1: copies pass through the host, expandable segments on",
        ),
    }


def test_several_gpus_without_nccl_fail(capsys, monkeypatch):
    monkeypatch.setattr(device, "nccl_version", lambda: None)
    with second_devices(2):
        ok, detail = said(capsys, status=3)["gpus"]
    assert not ok and "this torch has no NCCL" in detail
    with second_devices(1):
        ok, detail = said(capsys)["gpus"]
    assert ok and detail.startswith("NCCL absent, peer access between all, expandable segments off (PYTORCH_ALLOC")


def test_a_machine_without_a_gpu_has_no_lines_of_gpus(capsys):
    assert said(capsys) == {}


@pytest.mark.parametrize(("memory_gib", "fits"), [(80, True), (24, False)])
def test_the_room_for_a_recipe_is_that_of_its_plan(capsys, monkeypatch, memory_gib, fits):
    monkeypatch.setattr(doctor, "_download", lambda config: "")
    with second_devices(1) as devices:
        devices.memory = memory_gib * 2**30
        ok, detail = said(capsys, RECIPE, "num_devices=1", status=0 if fits else 3)["room"]
    assert ok == fits
    if fits:
        assert "the plan's peak is" in detail and "on 1 x emulated, 80.0 GiB" in detail
    else:
        assert detail.startswith("error[5002]") and "These settings fit: " in detail


@pytest.mark.parametrize(("memory_gib", "fits"), [(500.0, True), (16.0, False)])
def test_without_a_gpu_the_room_is_the_memory_of_the_machine(capsys, monkeypatch, memory_gib, fits):
    monkeypatch.setattr(doctor, "_download", lambda config: "")
    monkeypatch.setattr(doctor, "main_memory_gib", lambda: memory_gib)
    ok, detail = said(capsys, RECIPE, "num_devices=2", status=0 if fits else 3)["room"]
    assert ok == fits and f"2 processes on the CPU, with {memory_gib} GiB in all" in detail


def test_the_files_that_are_missing_are_counted_in_bytes(capsys, monkeypatch, tmp_path):
    sizes = {"model_index.json": 500, "vae/a.safetensors": 3_000_000_000, "vae/b.safetensors": 1_500_000_000}
    monkeypatch.setattr(hub, "files_to_fetch", lambda repo, revision: sizes)
    monkeypatch.setattr(doctor, "_room", lambda config, policy: "")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda repo, name, revision: str(tmp_path) if name == "vae/a.safetensors" else None,
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2e9))
    ok, detail = said(capsys, RECIPE)["download"]
    assert ok and detail.startswith(
        "1500000500 bytes (1.5 GB) in 2 of 3 files of stabilityai/stable-diffusion-3.5-medium"
    )
    sizes["vae/c.safetensors"] = 10**9
    ok, detail = said(capsys, RECIPE, status=3)["download"]
    assert not ok and "2.0 GB are free" in detail and "HF_HOME" in detail


def test_a_hub_that_does_not_answer_leaves_the_download_unknown(capsys, monkeypatch, tmp_path):
    def fail(repo, revision):
        raise NotFoundError("the hub does not answer")

    monkeypatch.setattr(hub, "files_to_fetch", fail)
    monkeypatch.setattr(doctor, "_room", lambda config, policy: "")
    assert said(capsys, RECIPE)["download"] == (True, "not known: the hub does not answer")


def test_an_invalid_recipe_has_one_line(capsys):
    rows = said(capsys, RECIPE, "batch_size=0", status=3)
    assert list(rows) == [f"recipe {RECIPE}"] and "batch_size" in rows[f"recipe {RECIPE}"][1]


def test_the_packages_of_a_reward_are_looked_for_by_the_doctor_and_before_a_run_makes_a_folder(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("unirl.config.dependencies.find_spec", lambda name: None)
    ok, detail = said(capsys, "diffusion/quickstart_ocr", status=3)["reward"]
    assert not ok and "reward 'ocr' needs rapidocr" in detail and "unirl[ocr]" in detail
    assert main(["train", "diffusion/quickstart_ocr", f"run.dir={tmp_path / 'run'}"]) == 3
    assert "reward 'ocr' needs rapidocr" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_what_cannot_be_told_is_not_called_ok(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_download", lambda config: f"{doctor.UNKNOWN}: the hub cannot be reached")
    assert main(["doctor", "diffusion/quickstart"]) == 0
    assert "NOTE  download: not known: the hub" in capsys.readouterr().out


def test_a_machine_with_fewer_cores_than_processes_is_told_by_check_plan_and_doctor(capsys, monkeypatch):
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(doctor, "main_memory_gib", lambda: 4096.0)
    words = [RECIPE, "scale=toy", "num_devices=64", "batch_size=64"]
    assert main(["check", *words]) == main(["plan", *words]) == 0
    assert capsys.readouterr().err.count("a run here would start 64 processes for 2 CPU cores") == 2
    assert main(["doctor", *words]) == 0
    assert "NOTE  room: slow: a run here would start 64 processes for 2 CPU cores" in capsys.readouterr().out


def test_the_environment_of_an_engine_is_looked_for_with_the_recipe(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("UNIRL_ENGINES", str(tmp_path))
    ok, detail = said(capsys, "llm/quickstart", "rollout=sglang", status=3)["engine"]
    assert not ok and "unirl engines install sglang" in detail
    assert said(capsys, "llm/quickstart")["engine"][0]


def test_the_name_of_an_engine_leads_to_that_of_its_environment(capsys):
    assert main(["doctor", "--engine", "sglang_diffusion"]) == 2
    assert "That of rollout=sglang_diffusion is sglang" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "works", "is_ok", "says"),
    [
        ("", {"osmesa"}, True, "MuJoCo draws with MUJOCO_GL=osmesa, which a run chooses by itself"),
        ("", set(), True, "not known how to draw .* libosmesa6"),
        ("egl", {"egl"}, True, "MuJoCo draws with MUJOCO_GL=egl"),
        ("egl", {"osmesa"}, False, "cannot draw with MUJOCO_GL=egl. Set MUJOCO_GL=osmesa"),
        ("glfw", set(), False, "cannot draw with MUJOCO_GL=glfw. Unset MUJOCO_GL"),
    ],
)
def test_a_missing_library_for_drawing_is_named(capsys, monkeypatch, given, works, is_ok, says):
    monkeypatch.setattr(doctor, "CHECKS", {"drawing": doctor._drawing})
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0")
    monkeypatch.setattr("unirl.envs.drawing.works", works.__contains__)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if given:
        monkeypatch.setenv("MUJOCO_GL", given)
    ok, detail = said(capsys, status=0 if is_ok else 3)["drawing"]
    assert ok == is_ok and re.search(says, detail)
