"""The threads of a run on the CPU: which number is chosen, and how its reason reads."""

from __future__ import annotations

import os

import pytest
import torch

from unirl.config.load import load
from unirl.plan import threads
from unirl.plan.threads import CpuState, Recorded, Requested, ThreadChoice, choose, requested_threads, threads_of

IDLE, BUSY, FULL = CpuState(8, 0.2), CpuState(8, 5.6), CpuState(2, 3.8)
TWO, SAVED = Requested(2, "OMP_NUM_THREADS"), Recorded(1, "checkpoint-000003")


@pytest.mark.parametrize(
    ("cpu", "given", "count", "why"),
    [
        (IDLE, {}, 8, "8 of 8 cores free at load 0.2; OMP_NUM_THREADS changes it"),
        (BUSY, {}, 2, "2 of 8 cores free at load 5.6; OMP_NUM_THREADS changes it"),
        (FULL, {}, 1, "1 of 2 cores free at load 3.8; OMP_NUM_THREADS changes it"),
        (IDLE, {"processes": 3}, 2, "8 of 8 cores free at load 0.2 / 3 processes; OMP_NUM_THREADS changes it"),
        (BUSY, {"processes": 3}, 1, "2 of 8 cores free at load 5.6 / 3 processes; OMP_NUM_THREADS changes it"),
        (IDLE, {"small": "toy scale"}, 1, "toy scale; OMP_NUM_THREADS changes it"),
        (IDLE, {"small": "toy scale", "requested": TWO}, 2, "OMP_NUM_THREADS"),
        (FULL, {"processes": 4, "requested": TWO}, 2, "OMP_NUM_THREADS"),
        (IDLE, {"recorded": SAVED}, 1, "recorded in checkpoint-000003"),
        (IDLE, {"recorded": SAVED, "requested": Requested(1, "OMP_NUM_THREADS")}, 1, "recorded in checkpoint-000003"),
        (
            IDLE,
            {"recorded": SAVED, "requested": TWO, "small": "toy scale"},
            1,
            "recorded in checkpoint-000003; OMP_NUM_THREADS=2 is ignored, since it would change the bits of the run",
        ),
    ],
)
def test_the_choice_follows_the_record_then_the_user_then_the_work_then_the_free_cores(cpu, given, count, why):
    assert choose(cpu, **given) == ThreadChoice(count, why)


@pytest.mark.parametrize(
    ("environ", "requested"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": ""}, None),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "2"}, TWO),
        ({"OMP_NUM_THREADS": " 2,1", "MKL_NUM_THREADS": "8"}, TWO),
        ({"MKL_NUM_THREADS": "8"}, Requested(8, "MKL_NUM_THREADS")),
    ],
)
def test_the_user_asks_by_the_variables_that_torch_reads(environ, requested):
    assert requested_threads(environ) == requested


@pytest.fixture
def idle_machine(monkeypatch):
    """A machine with 16 idle cores, whose user sets no number of threads."""
    monkeypatch.setattr(threads, "cpu_state", lambda: CpuState(16, 0.0))
    for name in (*threads.VARIABLES, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


RAY = ("runtime=ray", "num_devices=4")


@pytest.mark.parametrize(
    ("recipe", "overrides", "shown"),
    [
        ("diffusion/sd3_trainside", ("scale=toy",), "1 per process (toy scale; OMP_NUM_THREADS changes it)"),
        ("diffusion/quickstart", (), "1 per process (small model; OMP_NUM_THREADS changes it)"),
        ("vlm/quickstart", (), "1 per process (small model; OMP_NUM_THREADS changes it)"),
        ("llm/quickstart", RAY, "1 per process (small model; OMP_NUM_THREADS changes it)"),
    ],
)
def test_toy_scale_and_quick_starts_take_one_thread(recipe, overrides, shown, idle_machine):
    assert str(threads_of(load(recipe, overrides).config)) == shown


@pytest.mark.parametrize(
    ("overrides", "count"),
    [((), 16), (RAY, 4), ((*RAY, "devices_per_node=2"), 8), ((*RAY, "placement={train: all, reward: cpu x4}"), 2)],
)
def test_larger_work_shares_the_free_cores_among_its_processes(overrides, count, idle_machine, monkeypatch):
    monkeypatch.setattr(threads, "SMALL", 1)
    choice = threads_of(load("llm/quickstart", overrides).config)
    assert choice is not None and choice.count == count


def test_a_run_on_accelerators_or_elsewhere_chooses_nothing(idle_machine, monkeypatch):
    monkeypatch.setattr(threads, "num_accelerators", lambda: 1)
    assert threads_of(load("llm/quickstart").config) is None
    monkeypatch.setattr(threads, "num_accelerators", lambda: 0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert threads_of(load("llm/quickstart", RAY).config) is None


def test_a_container_that_may_use_half_a_core_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    seen = []
    for limit in ("max 100000", "50000 100000", "400000 100000"):
        threads.QUOTA.write_text(limit + "\n")
        seen.append(threads.cpu_state().cores)
    assert seen == [32, 1, 4]
    monkeypatch.setattr(os, "getloadavg", lambda: (3.6, 0.0, 0.0))
    assert CpuState(threads.cpu_state().cores, 3.6).free == 1


@pytest.mark.parametrize(("cores", "words", "is_crowded"), [
    (2, ["num_devices=64"], True), (64, ["num_devices=64"], False), (2, ["num_devices=2"], False), (1, [], False),
    (2, ["num_devices=8", "devices_per_node=2"], False), (2, ["num_devices=64", "runtime=local"], False),
])  # fmt: skip
def test_more_processes_than_cores_are_said_on_a_machine_without_a_gpu(monkeypatch, cores, words, is_crowded):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(threads, "at_most_quota", lambda count: count)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load("diffusion/sd3_trainside", ["batch_size=64", *words]).config
    why = threads.crowded(config)
    assert (why is not None) == is_crowded
    if why is not None:
        assert why.startswith("a run here would start 64 processes for 2 CPU cores") and "num_devices=2 or less" in why
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert threads.crowded(config) is None or config.runtime_in_use == "local"
