"""A deadlock in any phase ends the run within its deadline, with the stacks of all ranks, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.processes import is_running, wait_until
from tests.trainer.child import begin, said
from unirl.config.errors import PluginError, StallError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

pytestmark = pytest.mark.slow

HERE = "tests.trainer.hanging"
COMMON = (
    "scale=toy",
    "num_rollouts=2",
    "tracking.sample_steps=0",
    "evaluation.eval_steps=0",
    "plugins=[tests]",
)
TWO_WORKERS = ("runtime=ray", "num_devices=2")
TRAINSIDE, SEPARATE = "diffusion/sd3_trainside", "diffusion/sd3_replica_lora_separate"
DEADLINE_S = 8.0


def hanging(part: str, kind: str, until: Path) -> tuple[str, str]:
    """Overrides by which a part of the recipe waits for a file."""
    return f"{part}._target_={HERE}.{kind}", f"{part}.until={until}"


def trainer_of(folder: Path, recipe: str, *overrides: str):
    loaded = load(recipe, [*COMMON, *TWO_WORKERS, f"run.dir={folder}", *overrides])
    preflight(loaded)
    return build_trainer(loaded)


def assert_stalls(trainer, phase: str, folder: Path) -> None:
    for group in trainer.pool.groups.values():
        group.deadline_s = DEADLINE_S
    trainer.policy.roles.sync.deadline_s = DEADLINE_S
    start = time.monotonic()
    with pytest.raises(StallError) as stalled:
        trainer.train()
    assert time.monotonic() - start < 120.0
    message = str(stalled.value)
    assert f"phase {phase}" in message and f"{DEADLINE_S:g} s" in message
    stacks = [path.read_text() for path in (folder / "logs").rglob("*.txt")]
    assert any("hang_on_the_last_rank" in text for text in stacks), message


@pytest.mark.parametrize(
    ("phase", "recipe", "part", "kind"),
    [
        ("generate", TRAINSIDE, "rollout", "HangingEngine"),
        ("reward", TRAINSIDE, "reward.backend", "HangingScorer"),
        ("sync", SEPARATE, "rollout", "HangingReplica"),
    ],
)
def test_a_phase_that_hangs_is_named_with_the_stacks_of_all_ranks(phase, recipe, part, kind, workers, tmp_path) -> None:
    until = tmp_path / "until"
    with trainer_of(tmp_path / "run", recipe, *hanging(part, kind, until)) as trainer:
        try:
            assert_stalls(trainer, phase, tmp_path / "run")
        finally:
            until.touch()


def test_a_deadlock_in_training_is_named_and_leaves_no_process(ray_session, tmp_path) -> None:
    with trainer_of(tmp_path, TRAINSIDE, *hanging("algorithm", "HangingLoss", tmp_path / "never")) as trainer:
        pids = [worker.process_info.pid for group in trainer.pool.groups.values() for worker in group.worker_refs]
        assert_stalls(trainer, "train", tmp_path)
    assert wait_until(lambda: not any(map(is_running, pids)), 60.0), "a worker outlived its pool"


def test_an_exception_on_one_rank_is_what_the_user_sees(workers, tmp_path) -> None:
    failing = f"algorithm._target_={HERE}.FailingLoss"
    refusal = pytest.raises(PluginError, match="OverflowError: out of sorts")
    with trainer_of(tmp_path, TRAINSIDE, failing) as trainer, refusal as error:
        trainer.train()
    assert f"your class {HERE}.FailingLoss" in str(error.value)
    assert "raised by stack.train_track on the worker on device 1" in "".join(error.value.__notes__)


def test_an_exception_while_ranks_sample_in_step_is_what_the_user_sees(workers, tmp_path) -> None:
    """The other rank waits for a block that the failed one no longer gathers."""
    failing = (f"rollout._target_={HERE}.FailingEngine", "rollout.gather_weights=false")
    start = time.monotonic()
    refusal = pytest.raises(PluginError, match="OverflowError: out of sorts")
    with trainer_of(tmp_path, TRAINSIDE, *failing) as trainer, refusal as error:
        trainer.train()
    assert time.monotonic() - start < 240
    assert "raised by rollout.generate on the worker on device 1" in "".join(error.value.__notes__)


def test_the_local_runtime_ends_a_hanging_run(tmp_path) -> None:
    """The watchdog ends the process, so it is a process of its own."""
    folder = tmp_path / "run"
    words = (*COMMON, *hanging("reward.backend", "HangingScorer", tmp_path / "never"), "stall_timeout_s=12")
    child = begin(TRAINSIDE, folder, *words)
    child.join(600)
    assert child.exitcode == 8, said(folder)
    assert "error[8001]" in said(folder) and "phase reward" in said(folder)
    stacks = "".join(path.read_text() for path in (folder / "logs").rglob("*.txt"))
    assert "hang_on_the_last_rank" in stacks
