"""Runs that are killed by SIGKILL at chosen moments, and what must be equal after they were resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.run_files import metrics_of, reproducible
from tests.trainer.child import begin, said
from unirl.train.backend.checkpoint import verify

SEED = 20261120
Outcome = dict[str, object]


@dataclass(frozen=True)
class Run:
    """A recipe that is run to its end, over and over."""

    recipe: str
    num_steps: int
    overrides: tuple[str, ...]
    is_repeatable: bool = True
    """A second run is equal bit for bit. False: it trains the same prompts in the same steps."""

    def finish(self, folder: Path) -> Outcome:
        """Begin the run, or continue it, and see it to its end."""
        child = begin(self.recipe, folder, *self._settings())
        child.join(600)
        assert child.exitcode == 0, said(folder)
        return outcome(folder, self.num_steps) if self.is_repeatable else prompts_of(folder, self.num_steps)

    def kill_once(self, folder: Path, when: Callable[[], bool]) -> bool:
        """Start the run and SIGKILL it as soon as `when()` holds; False when it finished first."""
        child = begin(self.recipe, folder, *self._settings())
        while child.is_alive() and not when():
            time.sleep(0.002)
        killed = child.is_alive()
        if killed:
            os.kill(child.pid, signal.SIGKILL)
        child.join(300)
        return killed

    def _settings(self) -> tuple[str, ...]:
        return (*self.overrides, f"num_rollouts={self.num_steps}")


@dataclass(frozen=True)
class Unkilled:
    """A run that was never disturbed."""

    run: Run
    outcome: Outcome
    duration: float

    @classmethod
    def of(cls, run: Run, folder: Path) -> Unkilled:
        start = time.monotonic()
        return cls(run, run.finish(folder), time.monotonic() - start)

    def broken_cases(self, cases: range, folder: Path) -> list[int]:
        """The cases whose outcome differs from that of the unkilled run; two run at a time."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            outcomes = list(pool.map(lambda case: self.killed_then_resumed(case, folder / f"run{case}"), cases))
        return [case for case, result in zip(cases, outcomes, strict=True) if result != self.outcome]

    def killed_then_resumed(self, case: int, folder: Path) -> Outcome:
        """A run that was killed once: before the first checkpoint, while saving, or at a random time."""
        rng = random.Random(SEED + case)
        if case % 10 == 0:
            when = in_first_steps(folder)
        elif case % 3 == 1:
            when = while_saving(folder, rng.randint(1, 6))
        else:
            when = after_seconds(rng.uniform(0.05, 0.95) * self.duration)
        self.run.kill_once(folder, when)
        return self.run.finish(folder)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of a run that is killed often."""

    after_steps: int
    """The run was killed some time after it had finished so many steps."""
    delay_s: float
    steps_done: int
    """Steps in the metrics when the process ended."""
    checkpoint: int
    """The step of the newest checkpoint then, from which the run continues. 0: none, so that the run begins again."""
    hit: bool
    """False if the run had ended before."""


def killed_often(run: Run, folder: Path, kills: int, seed: int, step_s: float) -> list[Kill]:
    """Kills a run again and again, each time after more steps, and resumes it each time. It is not finished then.

    Args:
        seed: the moments are drawn with it and the run, so that they differ between runs.
        step_s: the delay after a step is at most twice as long.
    """
    choice = random.Random(f"{seed} {run.recipe} {run.overrides}")
    moments = sorted(choice.randrange(run.num_steps) for _ in range(kills))
    done = []
    for after in moments:
        delay = choice.uniform(0.0, 2 * step_s)
        hit = run.kill_once(folder, after_step(folder, after, delay))
        done.append(Kill(after, round(delay, 3), steps_in(folder), newest_checkpoint(folder), hit))
    return done


def steps_in(folder: Path) -> int:
    """Steps in the metrics of a run."""
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest published checkpoint of a run. 0 if there is none."""
    steps = [path.name.rpartition("-")[2] for path in folder.glob("checkpoints/checkpoint-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def after_step(folder: Path, steps: int, delay: float) -> Callable[[], bool]:
    """`delay` seconds after the run has finished so many steps, or has been continued behind them."""
    deadline: list[float] = []

    def now() -> bool:
        if not deadline and steps_in(folder) >= steps:
            deadline.append(time.monotonic() + delay)
        return bool(deadline) and time.monotonic() >= deadline[0]

    return now


def outcome(folder: Path, num_steps: int) -> Outcome:
    """Everything that must be equal: all files of metrics without their clocks, and the final state."""
    final = folder / "checkpoints" / f"checkpoint-{num_steps:06d}"
    return {
        "metrics": metrics_of(folder),
        "ledger": (folder / "ledger.jsonl").read_text(),
        "eval": [reproducible(json.loads(p.read_text())) for p in sorted(folder.glob("eval/*/scores.json"))],
        "pages": {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.glob("*/*/*.md"))},
        "samples": sorted(p.relative_to(folder).as_posix() for p in folder.glob("samples/*/*")),
        "weights": {
            p.relative_to(final).as_posix(): digest_of(p) for p in sorted(final.glob("policy*/**/*")) if p.is_file()
        },
        "problems of the final checkpoint": verify(final.with_name("checkpoint-final")),
        "trainer": {k: v for k, v in json.loads((final / "trainer.json").read_text()).items() if k != "recipe"},
    }


def prompts_of(folder: Path, num_steps: int) -> Outcome:
    """What must be equal between runs whose order of events is a matter of timing."""
    steps = [folder / f"samples/step-{step:06d}/manifest.jsonl" for step in range(1, num_steps + 1)]
    ids = [[json.loads(line)["sample_id"] for line in path.read_text().splitlines()] for path in steps]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    final = folder / "checkpoints" / "checkpoint-final"
    return {
        "weights": [],
        "samples of each step": ids,
        "steps of the ledger": [line["step"] for line in ledger],
        "generated, and neither trained nor replaced": [
            line["generated"] - line["scored"] - line["reasons"].get("too_old", 0) for line in ledger
        ],
        "problems of the final checkpoint": verify(final),
    }


def digest_of(path: Path) -> str:
    """The SHA-256 of a file; of tensors, of their names and bits, since several ranks write them in no fixed order."""
    if path.suffix != ".safetensors":
        return sha256(path.read_bytes()).hexdigest()
    digest = sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def after_seconds(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline


def while_saving(folder: Path, nth: int) -> Callable[[], bool]:
    """The n-th moment at which a checkpoint is being staged."""
    seen: set[str] = set()

    def now() -> bool:
        staging = {p.name for p in (folder / "checkpoints").glob(".staging-*")} if folder.exists() else set()
        seen.update(staging)
        return bool(staging) and len(seen) >= nth

    return now


def in_first_steps(folder: Path) -> Callable[[], bool]:
    """After the first metrics, before the first checkpoint."""
    return lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0
