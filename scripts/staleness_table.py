"""Trains a quick start with samples of earlier weights, with and without correction, on several seeds.

    python scripts/staleness_table.py llm/quickstart_async --steps 30 --set batch_size=8 --out benchmarks/staleness.json

Each row is a run: `max_staleness` 0, 1, 2 and 4; and how the loss treats samples of earlier weights. `ratio`: the
importance ratio starts from the weights that sampled (old_logp_source=rollout). `decoupled`: the ratio starts from the
weights before the step, and truncated importance weights account for those that sampled (mismatch). `none`: the loss
takes the samples for those of the weights that it trains. --out keeps the runs that the file has already. The runs are
in one process (runtime=local), whose results equal those of Ray. These 30 runs take 1 hour on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

from unirl.algorithms.shared.mismatch import TokenTIS
from unirl.config.load import load
from unirl.config.schema import dotted_name
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

CORRECTIONS = {
    "ratio": ("algorithm.old_logp_source=rollout",),
    "decoupled": (
        "algorithm.old_logp_source=replay",
        f"algorithm.mismatch={{_target_: {dotted_name(TokenTIS)}, cap: 2.0}}",
    ),
    "none": ("algorithm.old_logp_source=replay",),
}
LAST = 5
"""Steps at the end of a run whose mean reward is reported."""


def trained(
    folder: Path, recipe: str, steps: int, changed: list[str], seed: int, staleness: int, correction: str
) -> dict[str, float]:
    """The held-out score at the beginning and the end of a run, and its mean reward over the last steps."""
    settings = (
        *(f"run.dir={folder}", "runtime=local", f"num_rollouts={steps}", f"evaluation.eval_steps={steps}"),
        *(f"sampling.seed={seed}", "tracking.sample_steps=0", "save_interval=0", "watch.on_alarm=log"),
        *(f"asynchronous.max_staleness={staleness}", *CORRECTIONS[correction], *changed),
    )
    loaded = load(recipe, settings)
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    with open(folder / "eval_metrics.csv") as file:
        scores = [float(row["eval/reward_mean"]) for row in csv.DictReader(file)]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward_mean"] for row in rows]
    return {"start": scores[0], "end": scores[-1], "last_rewards": statistics.fmean(rewards[-LAST:])}


def main(
    recipe: str,
    steps: int,
    changed: list[str],
    seeds: list[int],
    staleness: list[int],
    corrections: list[str],
    out: Path,
) -> None:
    """Runs what the file does not have yet, seed by seed."""
    about = {"machine": platform.machine(), "cores": os.cpu_count()}
    record = json.loads(out.read_text()) if out.exists() else {"about": about, "runs": []}
    for seed in seeds:
        for k in staleness:
            for correction in corrections if k else ["ratio"]:
                key = {"recipe": recipe, "steps": steps, "set": changed, "seed": seed}
                key |= {"max_staleness": k, "correction": correction}
                if any(key.items() <= run.items() for run in record["runs"]):
                    continue
                with tempfile.TemporaryDirectory() as name:
                    run = key | trained(Path(name), recipe, steps, changed, seed, k, correction)
                print(json.dumps(run), flush=True)
                record["runs"].append(run)
                out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings other than the recipe's")
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    main(args.recipe, args.steps, args.set, args.seeds, args.staleness, args.corrections, args.out)
