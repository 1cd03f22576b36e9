"""A run that is killed anywhere and resumed equals one that never was: metrics, ledger and weights, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

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
PRELOAD = ["unirl.trainer.build", "unirl.models.sd3.bundle", "diffusers", "transformers", "peft", "torch._dynamo"]


def train(folder: str) -> None:
    """The body of a child process: the command that a user types, on one thread, since two run at a time."""
    import torch

    from unirl.cli.main import main

    torch.set_num_threads(1)
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(main(["train", "diffusion/sd3_trainside", *OVERRIDES, f"run.dir={folder}"]))


@pytest.fixture(scope="module")
def server():
    """Processes that start with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def finish(server, folder: Path) -> None:
    child = server.Process(target=train, args=(str(folder),))
    child.start()
    child.join(120)
    assert child.exitcode == 0, Path(f"{folder}.log").read_text()[-3000:]


def kill_once(server, folder: Path, when) -> bool:
    """Start the run and SIGKILL it as soon as `when()` holds; False when it finished first."""
    child = server.Process(target=train, args=(str(folder),))
    child.start()
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
        "metrics": [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "ledger": (folder / "ledger.jsonl").read_text(),
        "eval": [timeless(json.loads(p.read_text())) for p in sorted(folder.glob("eval/*/scores.json"))],
        "samples": sorted(p.relative_to(folder).as_posix() for p in folder.glob("samples/*/*")),
        "weights": {p.name: sha256(p.read_bytes()).hexdigest() for p in sorted((final / "policy").iterdir())},
        "trainer": {k: v for k, v in json.loads((final / "trainer.json").read_text()).items() if k != "recipe"},
    }


def timeless(row: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in row.items() if not k.startswith(("time/", "mem/", "throughput/"))}


@pytest.fixture(scope="module")
def unkilled(server, tmp_path_factory) -> tuple[dict[str, object], float]:
    folder = tmp_path_factory.mktemp("unkilled") / "run"
    start = time.monotonic()
    finish(server, folder)
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


def killed_then_resumed(case: int, server, duration: float, folder: Path) -> dict[str, object]:
    """The outcome of a run that was killed once: before the first checkpoint, while saving, or at a random time."""
    rng = random.Random(SEED + case)
    if case % 10 == 0:
        when = in_first_steps(folder)
    elif case % 3 == 1:
        when = while_saving(folder, rng.randint(1, 6))
    else:
        when = after_seconds(rng.uniform(0.05, 0.95) * duration)
    kill_once(server, folder, when)
    finish(server, folder)
    return outcome(folder)


def broken_cases(cases: range, server, unkilled, folder: Path) -> list[int]:
    """The cases whose outcome differs from that of the unkilled run; two run at a time."""
    expected, duration = unkilled
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = pool.map(lambda case: killed_then_resumed(case, server, duration, folder / f"run{case}"), cases)
        return [case for case, found in zip(cases, outcomes, strict=True) if found != expected]


def test_killed_runs_resume_bit_for_bit(server, unkilled, tmp_path) -> None:
    assert broken_cases(range(4), server, unkilled, tmp_path) == []


@pytest.mark.slow
def test_twenty_killed_runs_resume_bit_for_bit(server, unkilled, tmp_path) -> None:
    assert broken_cases(range(4, 24), server, unkilled, tmp_path) == []
