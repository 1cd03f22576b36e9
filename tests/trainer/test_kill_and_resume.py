"""A run that is killed anywhere and resumed equals one that never was: metrics, ledger and weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from tests.run_files import metrics_of, reproducible
from tests.trainer.child import begin, said

RECIPE = "diffusion/sd3_trainside"
NUM_STEPS = 30
SEED = 20261120
OVERRIDES = (
    "scale=toy",
    "stack.micro_batch_size=4",
    f"num_rollouts={NUM_STEPS}",
    "save_interval=4",
    "keep_checkpoints=2",
    "evaluation.eval_steps=10",
    "tracking.sample_steps=7",
    "backend.ema_cfg={target_decay: 0.9}",
)


def finish(folder: Path) -> None:
    child = begin(RECIPE, folder, *OVERRIDES)
    child.join(120)
    assert child.exitcode == 0, said(folder)


def kill_once(folder: Path, when) -> bool:
    """Start the run and SIGKILL it as soon as `when()` holds; False when it finished first."""
    child = begin(RECIPE, folder, *OVERRIDES)
    while child.is_alive() and not when():
        time.sleep(0.002)
    killed = child.is_alive()
    if killed:
        os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    return killed


def outcome(folder: Path) -> dict[str, object]:
    """Everything that must be equal: all files of metrics without their clocks, and the final state."""
    final = folder / "checkpoints" / f"checkpoint-{NUM_STEPS:06d}"
    return {
        "metrics": metrics_of(folder),
        "ledger": (folder / "ledger.jsonl").read_text(),
        "eval": [reproducible(json.loads(p.read_text())) for p in sorted(folder.glob("eval/*/scores.json"))],
        "samples": sorted(p.relative_to(folder).as_posix() for p in folder.glob("samples/*/*")),
        "weights": {p.name: sha256(p.read_bytes()).hexdigest() for p in sorted((final / "policy").iterdir())},
        "trainer": {k: v for k, v in json.loads((final / "trainer.json").read_text()).items() if k != "recipe"},
    }


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory) -> tuple[dict[str, object], float]:
    folder = tmp_path_factory.mktemp("unkilled") / "run"
    start = time.monotonic()
    finish(folder)
    return outcome(folder), time.monotonic() - start


def after_seconds(seconds: float):
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline


def while_saving(folder: Path, nth: int):
    """The n-th moment at which a checkpoint is being staged."""
    seen: set[str] = set()

    def now() -> bool:
        staging = {p.name for p in (folder / "checkpoints").glob(".staging-*")} if folder.exists() else set()
        seen.update(staging)
        return bool(staging) and len(seen) >= nth

    return now


def in_first_steps(folder: Path):
    """After the first metrics, before the first checkpoint."""
    return lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0


def killed_then_resumed(case: int, duration: float, folder: Path) -> dict[str, object]:
    """The outcome of a run that was killed once: before the first checkpoint, while saving, or at a random time."""
    rng = random.Random(SEED + case)
    if case % 10 == 0:
        when = in_first_steps(folder)
    elif case % 3 == 1:
        when = while_saving(folder, rng.randint(1, 6))
    else:
        when = after_seconds(rng.uniform(0.05, 0.95) * duration)
    kill_once(folder, when)
    finish(folder)
    return outcome(folder)


def broken_cases(cases: range, unkilled, folder: Path) -> list[int]:
    """The cases whose outcome differs from that of the unkilled run; two run at a time."""
    expected, duration = unkilled
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = pool.map(lambda case: killed_then_resumed(case, duration, folder / f"run{case}"), cases)
        return [case for case, found in zip(cases, outcomes, strict=True) if found != expected]


def test_killed_runs_resume_bit_for_bit(unkilled, tmp_path) -> None:
    assert broken_cases(range(4), unkilled, tmp_path) == []


@pytest.mark.slow
def test_more_killed_runs_resume_bit_for_bit(unkilled, tmp_path, pytestconfig) -> None:
    """Up to the number of `--kills`: 24 are the evidence, 8 the everyday check."""
    assert broken_cases(range(4, pytestconfig.getoption("kills")), unkilled, tmp_path) == []
