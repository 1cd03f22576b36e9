"""Runs recipes at toy scale and writes what was seen into their cards.

    python scripts/toy_cards.py diffusion/sd3_flowdppo diffusion/sd3_nft

A card says what a run gave: nothing is written by hand, and a run that fails leaves its card as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from datetime import date
from pathlib import Path

import yaml

from unirl.config.layers import leaves
from unirl.config.recipes import CARD_SUFFIX, find_recipe

STEPS = 2
MADE = {
    "evaluations": "eval/step-*/scores.json",
    "pages of samples": "samples/step-*/manifest.jsonl",
    "checkpoints": "checkpoints/checkpoint-*/MANIFEST.json",
}


def run(name: str, folder: Path) -> list[dict[str, float]]:
    """The metrics of a toy run, one row per step."""
    words = ["-m", "unirl.cli", "train", name, "scale=toy", f"num_rollouts={STEPS}", "tracking.sample_steps=1"]
    done = subprocess.run([sys.executable, *words, f"run.dir={folder}"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def seen(rows: list[dict[str, float]], folder: Path) -> str:
    """What the run gave, in a sentence."""
    latest = folder / "checkpoints" / (folder / "checkpoints" / "LATEST").read_text().strip()
    facts = [
        f"{json.loads((latest / 'trainer.json').read_text())['version']} updates",
        f"{sum(row['train/skipped_updates'] for row in rows):g} skipped",
        "gradient norm " + ", ".join(_norm(row) for row in rows),
        "reward " + ", ".join(f"{row['rollout/reward_mean']:.3f}" for row in rows),
    ]
    if "train/ratio_mean" in rows[0]:
        facts.append("ratio " + ", ".join(f"{row['train/ratio_mean']:.4f}" for row in rows))
    made = [f"{len(list(folder.glob(pattern)))} {what}" for what, pattern in MADE.items()]
    return "; ".join(facts) + "; " + ", ".join(made)


def _norm(row: dict[str, float]) -> str:
    """Of the last update of a step; a step whose updates were all skipped has none."""
    return f"{row['train/grad_norm']:.2g}" if "train/grad_norm" in row else "none"


def stand_ins(folder: Path) -> str:
    """What the recipe asks over HTTP, which at toy scale is a server of this machine's own."""
    resolved = yaml.safe_load((folder / "config" / "resolved.yaml").read_text())
    asked = [path for path, value in leaves(resolved) if path.endswith("base_url") and value == "toy"]
    return "".join(f"; what {path} names is a stand-in on this machine" for path in asked)


def write_card(path: Path, text: str, about: str) -> None:
    """The card of a recipe that ran at toy scale: what was seen, and what was not as the recipe says."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    result = (
        f"scale=toy num_rollouts={STEPS} (tiny model and scorer of the same classes, random weights{about}): {text}. "
        "Not run at full size."
    )
    fields = {
        "status": "toy",
        "hardware": f"{os.cpu_count()} CPU cores, at scale=toy",
        "date": str(date.today()),
        "commit": commit.stdout.strip(),
    }
    lines = [f"{name}: {value}" for name, value in fields.items()]
    path.write_text(
        "\n".join([*lines, "result: >-", *textwrap.wrap(result, 118, initial_indent="  ", subsequent_indent="  ")])
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    for name in parser.parse_args().recipes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "run")
            text, about = seen(run(name, folder), folder), stand_ins(folder)
        write_card(find_recipe(name).path.with_suffix(CARD_SUFFIX), text, about)
        print(f"{name}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
