"""A failure of an environment ends the episode of its slot, or those of its worker, and nothing else."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.processes import process_of
from unirl.config.errors import EpisodeError
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.slots import success_in
from unirl.types.environments import NOT_REPORTED, EnvironmentStep, EpisodeStart

FAULTY = "unirl.testing.toy_environments:Faulty-v0"
SLOTS = [0, 1, 2, 3]
PATIENCE_S = 60.0


def started(fault: str, workers: int, timeout_s: float = 60.0) -> GymnasiumEnvironment:
    """Four slots, of which slot 1 has a fault at its second step."""
    environment = GymnasiumEnvironment(id=FAULTY, workers=workers, timeout_s=timeout_s)
    options = [{"fault": fault} if slot == 1 else {} for slot in SLOTS]
    environment.reset(SLOTS, [EpisodeStart(seed=slot, options=options[slot]) for slot in SLOTS])
    return environment


def step(environment: GymnasiumEnvironment, slots: list[int]) -> EnvironmentStep:
    return environment.step(slots, torch.zeros(len(slots), dtype=torch.int64))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "why"),
    [("raise", "RuntimeError: the arm fell off"), ("nan", "not finite"), ("reward", "the reward is inf")],
)
def test_a_fault_ends_the_episode_of_its_slot_alone(fault, why, workers):
    environment = started(fault, workers)
    assert not step(environment, SLOTS).faults
    second = step(environment, SLOTS)
    assert second.faults.keys() == {1} and why in second.faults[1]
    assert second.truncated.tolist() == [False, True, False, False] and not second.terminated.any()
    assert second.rewards.tolist() == [1, 0, 1, 1]
    assert second.observations["state"].isfinite().all()
    assert not step(environment, [0, 2, 3]).faults
    environment.reset([1], [EpisodeStart(seed=9)])
    assert not step(environment, [1]).faults
    environment.close()


@pytest.mark.parametrize(
    ("fault", "why"), [("hang", r"did not answer within 2 s"), ("die", r"worker process .* ended \(status -9\)")]
)
def test_a_worker_that_hangs_or_dies_is_started_again_and_its_other_slots_are_faults(fault, why):
    environment = started(fault, workers=2, timeout_s=2.0)
    assert not step(environment, SLOTS).faults
    second = step(environment, [0, 1, 2])
    assert second.faults.keys() == {1}
    third = step(environment, [0, 2, 3])  # slot 3 is in the worker of slot 1
    assert third.faults.keys() == {2}
    assert re.search(why, second.faults[1]) and re.search(why, third.faults[2])
    environment.reset([1, 3], [EpisodeStart(seed=1), EpisodeStart(seed=3)])
    assert not step(environment, SLOTS).faults
    environment.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_cannot_start_again_is_made_anew(workers):
    environment = started("break", workers)
    step(environment, SLOTS), step(environment, SLOTS)
    observations = environment.reset([1], [EpisodeStart(seed=1)])
    assert observations["state"][0, 1] == 0 and not step(environment, [1]).faults
    environment.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slot_that_cannot_start_even_made_anew_ends_the_run(workers):
    environment = GymnasiumEnvironment(id=FAULTY, workers=workers)
    with pytest.raises(EpisodeError, match=r"slot 7 cannot start an episode \(seed=3\).*this environment cannot start"):
        environment.reset([7], [EpisodeStart(seed=3, options={"fault": "start"})])
    environment.close()


def test_success_is_reported_at_the_step_where_the_environment_says_so():
    environment = started("", workers=0)
    flags = [step(environment, SLOTS).success.tolist() for _ in range(5)]
    assert flags == [[0] * 4] * 4 + [[1] * 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_says_nothing_about_success_reports_none(workers):
    environment = GymnasiumEnvironment(id="CartPole-v1", workers=workers)
    environment.reset([0, 1], [EpisodeStart(seed=0), EpisodeStart(seed=1)])
    assert step(environment, [0, 1]).success.tolist() == [NOT_REPORTED] * 2
    environment.close()


@pytest.mark.parametrize(
    ("info", "expected"),
    [({}, -1), ({"success": 0.0}, 0), ({"success": True}, 1), ({"is_success": np.array([True])}, 1), ({"step": 1}, -1)],
)
def test_success_is_read_from_the_information_of_a_step(info, expected):
    assert success_in(info) == expected


RUN = """
import sys, time, torch
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.types.environments import EpisodeStart
environment = GymnasiumEnvironment(id=%r, workers=2)
environment.reset([0, 1], [EpisodeStart(seed=0), EpisodeStart(seed=1, options={"fault": "hang", "at": 1})])
print(*[worker._process.pid for worker in environment._slots._workers], flush=True)
environment.step([0, 1], torch.zeros(2, dtype=torch.int64))
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_no_worker_outlives_a_run_that_is_killed():
    with process_of([sys.executable, "-c", RUN % FAULTY], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        workers = [Path("/proc") / pid for pid in run.stdout.readline().split()]
        assert len(workers) == 2 and all(path.exists() for path in workers)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(alive(path) for path in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(path) for path in workers)


def test_close_ends_all_processes():
    environment = started("", workers=2)
    processes = [worker._process for worker in environment._slots._workers]
    assert [process.poll() for process in processes] == [None, None]
    environment.close()
    assert [process.poll() for process in processes] == [-9, -9]


def alive(path: Path) -> bool:
    try:
        return ") Z" not in (path / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
