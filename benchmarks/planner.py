"""Compares the steps that `unirl plan --auto` predicts with runs on five placements.

    python benchmarks/planner.py [--seconds 4] [--steps 6] [--json benchmarks/planner.json]
    python benchmarks/planner.py --steps 11 --layouts 4 --json benchmarks/planner.json     # one again, with more steps

The roles of benchmarks/asynchronous.py work and then sleep until their time is over, so more places than cores can be
timed. The seconds of the phases come from the first run, whose roles take turns, as with `unirl plan --auto --run`. The
loop, its queues and its transfers are those of any run. It takes 6 minutes on two cores. --layouts keeps the other rows
of the file, and its seconds of the phases.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from asynchronous import PROMPTS, SAMPLES, step_seconds

from unirl.plan.auto_placement import MeasuredStep
from unirl.plan.simulate import LoopSchedule, PhaseSeconds, predict
from unirl.tracking.tables import read_rows


@dataclass(frozen=True)
class Layout:
    """A placement to time, with a reward on the host's CPUs."""

    train: str
    rollout: str
    num_train: int
    num_rollout: int
    max_staleness: int
    reward_parts: int

    @property
    def words(self) -> tuple[str, ...]:
        """The settings of this placement, as on the command line."""
        devices = self.num_train if self.train == self.rollout else self.num_train + self.num_rollout
        return (
            f"placement.train={self.train}",
            f"placement.rollout={self.rollout}",
            f"num_devices={devices}",
            f"asynchronous.max_staleness={self.max_staleness}",
            f"reward_parts={self.reward_parts}",
        )


LAYOUTS = (
    Layout("0", "1", 1, 1, 0, 1),
    Layout("0", "0", 1, 1, 0, 8),
    Layout("0", "1", 1, 1, 1, 8),
    Layout("0", "1-2", 1, 2, 1, 8),
    Layout("0-1", "2", 2, 1, 2, 8),
)
"""The first one takes turns, so its phases can be told apart."""


def phases_of(folder: Path) -> PhaseSeconds:
    """The median seconds of the phases of a run, without its first step."""
    rows = list(read_rows(folder / "metrics.jsonl"))[1:]
    keys = {"generate": "time/generate", "score": "time/reward", "train": "time/train", "sync": "time/sync"}
    return PhaseSeconds(**{name: statistics.median(float(row[key]) for row in rows) for name, key in keys.items()})


def main(seconds: float, steps: int, layouts: list[int], path: Path | None) -> None:
    """Times placements and prints the prediction of each beside it."""
    for key, share in (("GENERATE_S", 1.0), ("SCORE_S", 0.25), ("TRAIN_S", 0.75)):
        os.environ[key] = str(seconds * share)
    known = json.loads(path.read_text()) if path is not None and path.exists() else None
    rows: list[dict[str, object] | None] = known["results"] if known is not None else [None] * len(LAYOUTS)
    phases = None
    if 0 not in layouts:
        if known is None:
            raise SystemExit(
                "--layouts without 0 needs the file of an earlier run, whose seconds it takes: name --json"
            )
        phases = PhaseSeconds(**known["about"]["seconds"])
    with tempfile.TemporaryDirectory() as name:
        for number in layouts:
            layout, folder = LAYOUTS[number], Path(name) / str(number)
            times = step_seconds(folder, "ray", steps, *layout.words)
            inner = times[layout.max_staleness + 1 : len(times) - layout.max_staleness]
            if phases is None:
                phases = phases_of(folder)
            measured = MeasuredStep(
                seconds=phases, num_rows=PROMPTS * SAMPLES, num_train=1, num_rollout=1, num_reward=1
            )
            schedule = LoopSchedule(
                seconds=measured.on(layout.num_train, layout.num_rollout, 1),
                max_staleness=layout.max_staleness,
                reward_parts=layout.reward_parts,
            )
            predicted, step = predict(schedule).step_seconds, statistics.fmean(inner)
            row = {
                "placement": " ".join(layout.words),
                "predicted_s": round(predicted, 3),
                "step_s": round(step, 3),
                "predicted_over_step": round(predicted / step, 3),
                "steps": len(inner),
            }
            print(json.dumps(row), flush=True)
            rows[number] = row
            if path is not None:
                about = {"machine": platform.machine(), "cores": os.cpu_count(), "seconds": vars(phases)}
                path.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of generation on one device")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--layouts", type=int, nargs="+", choices=range(len(LAYOUTS)), default=list(range(len(LAYOUTS))), metavar="N"
    )
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    main(args.seconds, args.steps, sorted(args.layouts), args.json)
