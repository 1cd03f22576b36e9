"""Runs recipes at toy scale and writes their cards.

    python scripts/toy_cards.py diffusion/sd3_flowdppo diffusion/sd3_nft
    python scripts/toy_cards.py diffusion/quickstart --trained runs/unirl/seed-42 runs/unirl/seed-1

The second form runs nothing: it reads finished full-size runs of one recipe, one directory per seed. Cards are never
edited by hand. A run that fails leaves the card as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

import yaml

from unirl.config.merge import leaves
from unirl.config.recipe_files import CARD_SUFFIX, Card, find_recipe

STEPS = 2
EXTERNAL_ENGINES = {"_sglang": "SGLang", "_vllmomni": "vLLM-Omni"}
"""Word in the name of a recipe to the engine that it is named after."""
SERVERS = {
    "SGLangRolloutEngine": "SGLang",
    "SGLangLLMRolloutEngine": "SGLang",
    "VLLMOmniRolloutEngine": "vLLM-Omni",
}
"""Class of an engine to the server that its fake server stands in for."""
Metrics = dict[str, float]


def run(name: str, folder: Path) -> None:
    """Train a recipe for two steps at toy scale."""
    settings = ["scale=toy", f"num_rollouts={STEPS}", "tracking.sample_steps=1", f"run.dir={folder}"]
    command = [sys.executable, "-m", "unirl.cli", "train", name, *settings]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        output = process.stdout[-2000:] + process.stderr[-2000:]
        raise SystemExit(f"{name} failed with status {process.returncode}:\n{output}")


def toy_card(name: str, folder: Path) -> Card:
    """The card of the recipe `name`, whose toy run wrote `folder`."""
    rows = read_metrics(folder)
    result = (
        f"{STEPS} steps at scale=toy, with a tiny model and scorer of the same classes and random weights"
        f"{stand_ins(name, folder)}. Written: {count(folder, 'evaluation', 'eval/step-*/scores.json')}, "
        f"{count(folder, 'page', 'samples/step-*/manifest.jsonl')} of samples, "
        f"{count(folder, 'checkpoint', 'checkpoints/checkpoint-[0-9]*/MANIFEST.json')}. Not run at full size."
    )
    return Card(
        status="toy",
        **circumstances(),
        **training_facts(folder, rows),
        gradient_norm=per_step(rows, "train/grad_norm", ".2g"),
        reward=per_step(rows, "rollout/reward_mean", ".3f"),
        reward_std=per_step(rows, "rollout/reward_std", ".3f"),
        ratio=per_step(rows, "train/ratio_mean", ".4f"),
        result=result,
    )


def trained_card(folders: Sequence[Path]) -> Card:
    """The card of a recipe that was trained at full size, once for each seed."""
    rewards = {}
    for folder in folders:
        seed = json.loads((folder / "run.json").read_text())["seed"]
        pages = [json.loads(path.read_text()) for path in sorted(folder.glob("eval/step-*/scores.json"))]
        rewards[seed] = [page["metrics"]["eval/reward_mean"] for page in (pages[0], pages[-1])]
    return Card(
        status="trained",
        **circumstances(),
        **training_facts(folders[0], read_metrics(folders[0])),
        reward="; ".join(f"{before:.3f} -> {after:.3f} (seed {seed})" for seed, (before, after) in rewards.items()),
        result="Trained at full size. The rewards are means on held-out prompts, before and after training.",
    )


def read_metrics(folder: Path) -> list[Metrics]:
    """The metrics of a run, one row per step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def training_facts(folder: Path, rows: Sequence[Metrics]) -> dict[str, str]:
    """The number of updates in the newest checkpoint, and of updates that were skipped."""
    latest = folder / "checkpoints" / (folder / "checkpoints" / "LATEST").read_text().strip()
    versions = json.loads((latest / "trainer.json").read_text())["versions"]
    updates = "; ".join(f"{name} {count}".lstrip() for name, count in versions.items())
    skipped = sum(value for row in rows for name, value in row.items() if name.endswith("train/skipped_updates"))
    return {"updates": updates, "skipped_updates": f"{skipped:g}"}


def per_step(rows: Sequence[Metrics], metric: str, form: str) -> str:
    """The values of a metric in each step, track by track where it has the name of a track.

    A step whose updates were all skipped has no gradient norm.
    """
    names = {name: None for row in rows for name in row if name.endswith(f"/{metric}")}
    if metric not in rows[0] and names:
        return "; ".join(f"{name.removesuffix(f'/{metric}')} {per_step(rows, name, form)}" for name in names)
    values = [f"{row[metric]:{form}}" if metric in row else "none" for row in rows]
    return ", ".join(values) if set(values) != {"none"} else "none"


def count(folder: Path, noun: str, pattern: str) -> str:
    """The number of matching files with its noun, such as `2 evaluations`."""
    number = len(list(folder.glob(pattern)))
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def stand_ins(name: str, folder: Path) -> str:
    """Names what stands in for something else: a local server for a service, the replica for the engine in the name."""
    resolved = yaml.safe_load((folder / "config" / "resolved.yaml").read_text())
    urls = [path for path, value in leaves(resolved) if path.endswith("base_url") and value == "toy"]
    replicas = [path for path, value in leaves(resolved) if str(value).endswith(".ReplicaRolloutEngine")]
    fakes = [
        path.rpartition(".")[0]
        for path, value in leaves(resolved)
        if path.endswith("rollout.program") and value == "fake"
    ]
    targets = dict(leaves(resolved))
    faked = {SERVERS[str(targets[f"{path}._target_"]).rpartition(".")[2]] for path in fakes}
    text = f"; a local server stands in for {', '.join(urls)}" if urls else ""
    text += "".join(f"; a fake server of UniRL stands in for {engine}" for engine in sorted(faked))
    for word, engine in EXTERNAL_ENGINES.items():
        if word in name and replicas:
            text += f"; the replica engine stands in for {engine}, also at full size"
    return text


def circumstances() -> dict[str, str]:
    """Machine, date and commit of this run."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {"hardware": f"{os.cpu_count()} CPU cores", "date": str(date.today()), "commit": commit.stdout.strip()}


def render(card: Card) -> str:
    """The text of a card's file."""
    return yaml.safe_dump(asdict(card), sort_keys=False, width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--trained", nargs="+", type=Path, metavar="RUN_DIR", help="finished runs of the one recipe")
    options = parser.parse_args()
    if options.trained and len(options.recipes) > 1:
        parser.error("--trained takes the runs of one recipe")
    for name in options.recipes:
        with tempfile.TemporaryDirectory() as scratch:
            if not options.trained:
                run(name, Path(scratch, "run"))
            card = trained_card(options.trained) if options.trained else toy_card(name, Path(scratch, "run"))
        find_recipe(name).path.with_suffix(CARD_SUFFIX).write_text(render(card))
        print(f"{name}: {card.updates} updates, reward {card.reward}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
