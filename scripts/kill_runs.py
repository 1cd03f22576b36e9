"""Kills a run of any recipe by SIGKILL again and again, resumes it, and compares it with a run that was never killed.

    python scripts/kill_runs.py pe/pe_trainside_pickscore scale=toy --kills 10 --out benchmarks/kill_runs_pe.json

The moments are drawn with --seed: a step for each kill, and a delay of up to two steps after it. So a kill hits a step,
a checkpoint, an evaluation, or the start of the resumed run. Metrics without clocks, the ledger, evaluations, pages and
samples, and the weights, optimizers and trainer state of the last checkpoint must be equal, bit for bit. Exit status 1:
something differs. A toy recipe takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.trainer.killing import Run, Unkilled, killed_often  # noqa: E402

SETTINGS = ("evaluation.eval_steps=5", "tracking.sample_steps=4", "save_interval=2", "keep_checkpoints=2")
"""Settings of the runs. Those of the command line come after them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="key=value, as for unirl train")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12, help="steps of the run (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.chdir(ROOT)
    run = Run(options.recipe, options.steps, (*SETTINGS, *options.settings))
    with tempfile.TemporaryDirectory() as scratch:
        unkilled = Unkilled.of(run, Path(scratch, "unkilled"))
        print(f"unkilled: {options.steps} steps in {unkilled.duration:.0f} s", flush=True)
        folder = Path(scratch, "killed")
        kills = killed_often(run, folder, options.kills, options.seed, unkilled.duration / options.steps)
        for kill in kills:
            print(json.dumps(asdict(kill)), flush=True)
        result = run.finish(folder)
    differs = [name for name, value in unkilled.outcome.items() if result[name] != value]
    hits = sum(kill.hit for kill in kills)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    report = {
        "recipe": options.recipe,
        "settings": [*run.overrides, f"num_rollouts={options.steps}"],
        "seed": options.seed,
        "date": str(date.today()),
        "commit": commit.stdout.strip(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "kills": [asdict(kill) for kill in kills],
        "compared": list(unkilled.outcome),
        "files_of_weights": sorted(unkilled.outcome["weights"]),  # type: ignore[call-overload]
        "differs_in": differs,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{hits} of {len(kills)} kills hit the run; " + (f"different: {', '.join(differs)}" if differs else "equal"))
    return 0 if not differs and hits == len(kills) else 1


if __name__ == "__main__":
    sys.exit(main())
