"""Kills runs of any recipes by SIGKILL again and again, resumes them, and compares them with runs never killed.

    python scripts/kill_runs.py pe/pe_trainside_pickscore scale=toy --kills 10 --out benchmarks/kill_runs_pe.json
    python scripts/kill_runs.py 'unified_model/*' scale=toy runtime=ray num_devices=2 --kills 1 --steps 3
    python scripts/kill_runs.py 'vlm/*sglang*' 'llm/quickstart rollout=openai' scale=toy --kills 1 --steps 3

The moments are drawn with --seed and the run: a step for each kill, and a delay of up to two steps after it. So a
kill hits a step, a checkpoint, an evaluation, or the start of the resumed run. A run without a checkpoint begins
again. Metrics without clocks, the ledger, evaluations, pages and samples, and the weights, optimizers and trainer
state of the last checkpoint must be equal, bit for bit. A run with `asynchronous.order=free` cannot be repeated; its
steps must train the samples that they train without kills, each of them once. Each row names the engines of its run
and the programs of their servers. --out is written after each run. Exit status 1: something differs. A toy recipe
takes some minutes.
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
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.trainer.killing import Run, Unkilled, killed_often  # noqa: E402
from unirl.config.load import load  # noqa: E402
from unirl.config.recipe_files import list_recipes  # noqa: E402

SETTINGS = ("evaluation.eval_steps=5", "tracking.sample_steps=4", "save_interval=2", "keep_checkpoints=2")
"""Settings of the runs. Those of the command line come after them."""
ALL_SAMPLES = ("tracking.sample_steps=1", "tracking.max_samples=100000")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words",
        nargs="+",
        help="names of recipes or patterns such as 'pe/*', each with settings of its own such as 'llm/quickstart "
        "rollout=openai', and settings of all: key=value, as for unirl train",
    )
    parser.add_argument("--kills", type=int, default=10, help="kills of each run (default 10)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.chdir(ROOT)
    known = [recipe.name for recipe in list_recipes()]
    shared = [word for word in options.words if "=" in word.split()[0]]
    runs: list[Run] = []
    for pattern, *own in (word.split() for word in options.words if word not in shared):
        recipes = [name for name in known if fnmatch(name, pattern)]
        if not recipes:
            parser.error(f"no recipe is called {pattern}. `unirl recipes` lists them")
        runs += [run_of(name, options.steps, (*own, *shared)) for name in recipes]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    rows: list[dict[str, object]] = []
    report = {
        "seed": options.seed,
        "date": str(date.today()),
        "commit": commit.stdout.strip(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "runs": rows,
    }
    for run in dict.fromkeys(runs):
        rows.append(killed_run(run, options.kills, options.seed))
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["equal"] and row["hits"] == options.kills for row in rows) else 1


def run_of(name: str, steps: int, words: tuple[str, ...]) -> Run:
    """The run of a recipe. One that cannot be repeated writes the names of all of its samples."""
    if load(name, words).config.asynchronous.is_free:
        return Run(name, steps, (*SETTINGS, *ALL_SAMPLES, *words), is_repeatable=False)
    return Run(name, steps, (*SETTINGS, *words))


def engines_of(run: Run) -> list[str]:
    """The class of each engine of a run; of one with a server of an environment of its own, also its program."""
    policies = load(run.recipe, run.overrides).policies.values()
    engines = {policy.path_of("rollout"): policy.rollout for policy in policies}.values()
    programs = [engine.get("program", str) for engine in engines]
    return [
        f"{engine.class_name} with program={program}" if program else engine.class_name
        for engine, program in zip(engines, programs, strict=True)
    ]


def killed_run(run: Run, num_kills: int, seed: int) -> dict[str, object]:
    """The record of a run that was killed and resumed, compared with one that was not killed."""
    engines = engines_of(run)
    with tempfile.TemporaryDirectory() as scratch:
        unkilled = Unkilled.of(run, Path(scratch, "unkilled"))
        folder = Path(scratch, "killed")
        kills = killed_often(run, folder, num_kills, seed, seconds_of_a_step(Path(scratch, "unkilled")))
        result = run.finish(folder)
    differs = [name for name, value in unkilled.outcome.items() if result[name] != value]
    hits = sum(kill.hit for kill in kills)
    resumes = sum(kill.hit and kill.checkpoint > 0 for kill in kills)
    verdict = f"different: {', '.join(differs)}" if differs else "equal"
    took = f"unkilled {run.num_steps} steps in {unkilled.duration:.0f} s"
    hit = f"{hits} of {num_kills} kills hit the run, {resumes} of them after a checkpoint"
    print(f"{run.recipe} ({', '.join(engines)}): {took}; {hit}; {verdict}", flush=True)
    return {
        "recipe": run.recipe,
        "settings": [*run.overrides, f"num_rollouts={run.num_steps}"],
        "engines": engines,
        "seconds_unkilled": round(unkilled.duration, 1),
        "kills": [asdict(kill) for kill in kills],
        "hits": hits,
        "hits_after_a_checkpoint": resumes,
        "compared": list(unkilled.outcome),
        "files_of_weights": sorted(unkilled.outcome["weights"]),  # type: ignore[call-overload]
        "differs_in": differs,
        "equal": not differs,
    }


def seconds_of_a_step(folder: Path) -> float:
    """The median time of a step, without the start of the run."""
    rows = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return median(row["time/step"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
