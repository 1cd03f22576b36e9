"""A deadlock in any phase ends the run within its deadline, with the stacks of all ranks, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import is_running, wait_until
from unirl.config.errors import StallError, WorkerError
from unirl.config.load import load
from unirl.config.preflight import preflight
from unirl.trainer.build import build_trainer

pytestmark = pytest.mark.slow

HERE = "tests.trainer.hanging"
COMMON = (
    "scale=toy",
    "num_rollouts=2",
    "tracking.sample_steps=0",
    "evaluation.eval_steps=0",
    "plugins=[tests]",
    "runtime=ray",
    "num_devices=2",
)
CASES = {
    "generate": ("diffusion/sd3_trainside", f"rollout._target_={HERE}.HangingEngine", "hang_on_the_last_rank"),
    "reward": ("diffusion/sd3_trainside", f"reward.backend._target_={HERE}.HangingScorer", "hang_on_the_last_rank"),
    "train": ("diffusion/sd3_trainside", f"algorithm._target_={HERE}.HangingLoss", "hang_on_the_last_rank"),
    "sync": ("diffusion/sd3_replica_lora_separate", f"rollout._target_={HERE}.HangingReplica", "hang"),
}


def trainer_of(folder: Path, recipe: str, *overrides: str):
    loaded = load(recipe, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    return build_trainer(loaded)


@pytest.mark.parametrize("phase", CASES)
def test_a_deadlock_is_named_with_the_stacks_of_all_ranks(phase, ray_session, tmp_path) -> None:
    recipe, override, function = CASES[phase]
    trainer = trainer_of(tmp_path, recipe, override)
    pool = trainer.parts.pool
    pids = [member.about.pid for group in pool.groups.values() for member in group.members]
    for group in pool.groups.values():
        group.deadline_s = 4.0
    trainer.parts.sync.deadline_s = 4.0
    start = time.monotonic()
    try:
        with pytest.raises(StallError) as stalled:
            trainer.train()
        assert time.monotonic() - start < 30.0
        message = str(stalled.value)
        assert f"phase {phase}" in message and "4 s" in message
        stacks = [path.read_text() for path in (tmp_path / "logs").rglob("*.txt")]
        assert any(function in text for text in stacks), message
    finally:
        trainer.close()
        trainer.tracker.finish(8, "stalled")
    assert wait_until(lambda: not any(map(is_running, pids)), 5.0), "a worker outlived its pool"


def test_an_exception_on_one_rank_is_what_the_user_sees(ray_session, tmp_path) -> None:
    trainer = trainer_of(tmp_path, "diffusion/sd3_trainside", f"algorithm._target_={HERE}.FailingLoss")
    try:
        with pytest.raises(
            WorkerError, match=r"train_track failed on the worker on device 1 .*OverflowError: out of sorts"
        ):
            trainer.train()
    finally:
        trainer.close()
        trainer.tracker.finish(10, "failed")


def test_the_local_runtime_ends_a_hanging_run(tmp_path) -> None:
    """The watchdog ends the process, so it is a process of its own."""
    words = [
        "--config-name=diffusion/sd3_trainside",
        *COMMON[:-2],
        f"reward.backend._target_={HERE}.HangingScorer",
        "stall_timeout_s=5",
        f"run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "unirl.train_diffusion", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 8, done.stderr[-3000:]
    assert "error[8001]" in done.stderr and "phase reward" in done.stderr
    stacks = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("*.txt"))
    assert "hang_on_the_last_rank" in stacks
