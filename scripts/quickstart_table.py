"""Runs a quick start with several seeds through the command line and writes the held-out rewards.

    python scripts/quickstart_table.py llm/quickstart --out benchmarks/llm_quickstart.json    # some minutes per seed

Each seed is a separate process, `unirl train RECIPE sampling.seed=SEED`. `seconds` is the time of the whole command.
Rows: seed, held-out reward at each evaluation, steps, seconds, CPU seconds. Exit status 1: the reward of a seed rose by
less than --rise, or the seed took longer than --minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

SHOWN = ("eval/reward_", "eval/avg@", "eval/pass@", "eval/maj@")
"""Prefixes of the evaluation metrics that are written."""


@dataclass(frozen=True)
class Trial:
    """The result of one seed."""

    seed: int
    steps: int
    seconds: float
    cpu_seconds: float
    """CPU time of all processes and threads of the run, independent of other work on the machine."""
    evaluations: list[dict[str, float]]
    """Metrics of each evaluation, in order."""

    @property
    def rise(self) -> float:
        first, last = (self.evaluations[i]["eval/reward_mean"] for i in (0, -1))
        return last - first

    def __str__(self) -> str:
        path = " -> ".join(f"{metrics['eval/reward_mean']:.3f}" for metrics in self.evaluations)
        return f"| {self.seed} | {path} | {self.steps} | {self.seconds:.0f} | {self.cpu_seconds:.0f} |"


def run(recipe: str, seed: int, settings: list[str], folder: Path, shown: tuple[str, ...] = SHOWN) -> Trial:
    """Trains once and reads the files of the run. Keeps the evaluation metrics that begin with one of `shown`."""
    command = [sys.executable, "-m", "unirl.cli", "train", recipe, f"sampling.seed={seed}", f"run.dir={folder}"]
    began, used = time.perf_counter(), cpu_seconds()
    done = subprocess.run([*command, *settings], capture_output=True, text=True)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    if done.returncode:
        raise SystemExit(
            f"seed {seed} failed with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    return Trial(
        seed,
        steps,
        round(seconds, 1),
        round(cpu, 1),
        [scores(path, shown) for path in sorted(folder.glob("eval/step-*"))],
    )


def cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def scores(folder: Path, shown: tuple[str, ...] = SHOWN) -> dict[str, float]:
    """The metrics of one evaluation that begin with one of `shown`."""
    metrics = json.loads((folder / "scores.json").read_text())["metrics"]
    return {"step": int(folder.name.rpartition("-")[2])} | {
        name: round(value, 4) for name, value in metrics.items() if name.startswith(shown)
    }


def circumstances() -> dict[str, Any]:
    """Date, commit and machine of the measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "date": str(date.today()),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "as the run chooses"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="key=value, as for unirl train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--rise", type=float, default=0.2)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = {"recipe": args.recipe, "settings": args.settings} | circumstances()
    trials = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            trials.append(run(args.recipe, seed, args.settings, Path(scratch, "run")))
        print(trials[-1], flush=True)
    report["trials"] = [asdict(trial) | {"rise": round(trial.rise, 4)} for trial in trials]
    report["claim"] = {"rise": args.rise, "minutes": args.minutes}
    report["holds"] = all(trial.rise >= args.rise and trial.seconds <= 60 * args.minutes for trial in trials)
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
