"""Trains every family with every algorithm on every engine at toy scale, and writes which combinations ran.

    OMP_NUM_THREADS=1 python scripts/support_matrix.py                    every cell, one process per family
    OMP_NUM_THREADS=1 python scripts/support_matrix.py --family wan21 z_image
    python scripts/support_matrix.py --render                             only writes the page and the README again

A cell runs one step at scale=toy of a family's own recipe, overridden by keys of an algorithm's recipe and of an
engine's recipe. It counts as run if the step ended with a finite reward, an update, and a gradient that was not zero.
The page lists the reasons of the other cells. Nothing on it is edited by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "support_matrix.json"
PAGE = ROOT / "docs" / "support.md"
README = ROOT / "README.md"
RECIPES = ROOT / "examples" / "diffusion"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"

FAMILIES: Mapping[str, tuple[str, str]] = {
    "sd3": ("Stable Diffusion 3, 3.5", "sd3_trainside"),
    "qwen_image": ("Qwen-Image", "qwen_image_trainside"),
    "qwen_image_edit": ("Qwen-Image-Edit", "qwen_image_edit_trainside"),
    "flux1": ("FLUX.1-dev", "flux1_dev_trainside"),
    "flux2_klein": ("FLUX.2-klein", "flux2_klein_trainside"),
    "flux2_klein_edit": ("FLUX.2-klein, editing", "flux2_klein_editreward"),
    "z_image": ("Z-Image", "z_image_trainside"),
    "lumina2": ("Lumina-Image 2.0", "lumina2_trainside"),
    "wan21_t2v": ("Wan 2.1 T2V", "wan21_t2v"),
    "wan21_i2v": ("Wan 2.1 I2V", "wan21_i2v"),
    "wan22_t2v": ("Wan 2.2 T2V A14B", "wan22_t2v_14b"),
    "wan22_i2v": ("Wan 2.2 I2V A14B", "wan22_i2v"),
    "wan22_ti2v": ("Wan 2.2 TI2V 5B", "wan22_ti2v_5b"),
    "hunyuan_video": ("HunyuanVideo", "hunyuan_video_t2v_trainside"),
    "hunyuan_video15": ("HunyuanVideo 1.5", "hunyuan_video15_t2v_dancegrpo_trainside"),
}
"""The label of each family, and its recipe with model, reward and data."""
UNGUIDED = {"guidance_scale": 1.0, "guidance_scale_2": None, "init_same_noise": False}
ALGORITHMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Flow-GRPO": ("sd3_flowgrpo", {}),
    "DanceGRPO": ("sd3_dancegrpo", {}),
    "MixGRPO": ("sd3_mixgrpo", {}),
    "GRPO-Guard": ("sd3_grpo_guard", {}),
    "Flow-DPPO": ("sd3_flowdppo", {}),
    "PPO": ("sd3_ppo", {}),
    "DPOK": ("sd3_dpok", {}),
    "NFT": ("sd3_nft", UNGUIDED),
    "AWM": ("sd3_awm", UNGUIDED),
    "RWR": ("sd3_rwr", UNGUIDED),
    "DPO": ("sd3_online_dpo", UNGUIDED),
    "ReFL": ("sd3_refl", {}),
    "DRaFT": ("sd3_draft", {}),
    "DRTune": ("sd3_drtune", {}),
}
"""The recipe of each algorithm, whose keys override those of the family, and further sampling keys."""
ENGINES: Mapping[str, str | None] = {
    "trainside": None,
    "replica, colocate": "sd3_replica_lora_colocate",
    "replica, separate": "sd3_replica_lora_separate",
}
OF_ALGORITHM = ("backend", "advantage", "algorithm", "stack", "sampling")
OF_FAMILY = ("height", "width", "num_frames", "guidance_scale", "num_inference_steps", "max_sequence_length")
OF_ENGINE = ("num_devices", "placement", "rollout", "sync")
SETTINGS = ("scale=toy", "num_rollouts=1", "evaluation.eval_steps=0", "tracking.sample_steps=0", "save_interval=0")
OPENING = """\
<!-- Written by a script, not by hand: .venv/bin/python scripts/support_matrix.py --render -->
# Support: families, algorithms, engines

`OMP_NUM_THREADS=1 .venv/bin/python scripts/support_matrix.py` tried {count} combinations at toy scale and wrote this
page. Each combination takes the recipe of a family, replaces its keys by those of an algorithm and of an engine, and
does one step of the training loop. The models are tiny, have random weights, and use the same classes as the full
models. A cell is **yes** only if the step ended with a finite reward, an update and a gradient that was not zero. This
page says nothing about models of full size. The card of each recipe states what was run at full size. Other engines
(SGLang, vLLM-Omni) are in [engines.md](engines.md).

Measured on {date} at commit {commit} with {machine}."""


def own_keys(recipe: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Returns the wanted blocks of a recipe file, without the sizes and guidance, which the family sets."""
    content = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    blocks = {key: content[key] for key in wanted if key in content}
    if "sampling" in blocks:
        blocks["sampling"] = {key: value for key, value in blocks["sampling"].items() if key not in OF_FAMILY}
    return blocks


def lineage(recipe: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the recipe that a recipe extends, and its own keys. A base recipe returns its own name."""
    content = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    parents = [name for name in content.pop("defaults", []) if name != "_self_"]
    return (parents[0], content) if parents else (recipe, {})


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Merges trees; later ones win. A block with another `_target_` replaces the whole block."""
    whole: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            under = whole.get(key)
            joins = isinstance(under, dict) and isinstance(value, dict)
            whole[key] = merged(under, value) if joins and _same_target(under, value) else value  # type: ignore[arg-type]
    return whole


def _same_target(under: Any, value: Any) -> bool:
    return "_target_" not in value or under.get("_target_") == value["_target_"]


def cell_recipe(family: str, algorithm: str, engine: str, folder: Path) -> str:
    """Writes a recipe below `folder` that combines the three, and returns its name."""
    recipe, sampling = ALGORITHMS[algorithm]
    engine_recipe = ENGINES[engine]
    whole, variant = lineage(FAMILIES[family][1])
    body = merged(
        variant,
        own_keys(recipe, OF_ALGORITHM),
        {"sampling": dict(sampling)} if sampling else {},
        own_keys(engine_recipe, OF_ENGINE) if engine_recipe else {},
    )
    name = re.sub(r"\W+", "_", f"{family} {algorithm} {engine}".lower())
    text = yaml.safe_dump({"defaults": [whole, "_self_"], **body}, sort_keys=False)
    path = folder / "diffusion" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{text}")
    return f"diffusion/{name}"


def run_cell(family: str, algorithm: str, engine: str) -> dict[str, Any]:
    """Returns the metrics of one step, or the reason why it did not run."""
    from unirl.config.errors import UniRLError
    from unirl.config.load import load
    from unirl.config.recipe_files import search_path
    from unirl.plan.preflight import preflight
    from unirl.trainer.assemble import build_trainer

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            name = cell_recipe(family, algorithm, engine, folder / "recipes")
            recipe = load(name, [*SETTINGS, f"run.dir={folder / 'run'}"], (folder / "recipes", *search_path()))
            preflight(recipe)
        except (UniRLError, ValueError) as error:
            return {"ran": False, "refused": " ".join(str(error).split())}
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
                build_trainer(recipe) as trainer,
            ):
                trainer.train()
        except Exception as error:  # the cell reports any error
            return {"ran": False, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        row = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    seen = {key: row.get(f"{space}/{key}") for space, key in (("rollout", "reward_mean"), ("train", "grad_norm"))}
    ran = all(isinstance(value, float) and math.isfinite(value) for value in seen.values()) and seen["grad_norm"] > 0
    return {"ran": ran, **seen, "seconds": round(time.perf_counter() - start, 1)}


def run_family(family: str) -> dict[str, Any]:
    """Runs all cells of a family, and returns them by algorithm and engine."""
    cells: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        cells[algorithm] = {engine: run_cell(family, algorithm, engine) for engine in ENGINES}
        words = ", ".join("yes" if cell["ran"] else "no" for cell in cells[algorithm].values())
        print(f"{family:18} {algorithm:12} {words}", flush=True)
    return cells


def measure(families: list[str]) -> None:
    """Runs the cells of `families` and updates them in the result file."""
    before = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    context = multiprocessing.get_context("spawn")
    for family in families:
        with context.Pool(1) as pool:  # a separate process, so that its memory is freed
            before[family] = pool.apply(run_family, (family,))
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        about = {
            "date": str(date.today()),
            "commit": commit.stdout.strip(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}",
        }
        cells = {name: before[name] for name in FAMILIES if name in before}
        RESULT.write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n")


def page(result: Mapping[str, Any]) -> str:
    """The text of docs/support.md."""
    cells = result["cells"]
    count = sum(len(engines) for algorithms in cells.values() for engines in algorithms.values())
    parts = [OPENING.format(count=count, **{key: result[key] for key in ("date", "commit", "machine")})]
    notes: list[str] = []
    for engine in ENGINES:
        parts.append(f"## {engine[0].upper()}{engine[1:]}\n\n" + "\n".join(_table(cells, engine, notes)))
    reasons = "\n".join(f"{i + 1}. {note}" for i, note in enumerate(notes))
    refusals = f"## Reasons\n\nThese are the recorded messages of `unirl check` or of the run:\n\n{reasons}"
    parts.append(refusals if notes else "Every cell ran.")
    return "\n\n".join(parts) + "\n"


def _table(cells: Mapping[str, Any], engine: str, notes: list[str]) -> Iterator[str]:
    yield "| family | " + " | ".join(ALGORITHMS) + " |"
    yield "|---|" + "---|" * len(ALGORITHMS)
    for family, algorithms in cells.items():
        marks = [_mark(algorithms[name][engine], notes) for name in ALGORITHMS]
        yield f"| {FAMILIES[family][0]} | " + " | ".join(marks) + " |"


def _mark(cell: Mapping[str, Any], notes: list[str]) -> str:
    if cell["ran"]:
        return "yes"
    why = cell.get("refused") or cell.get("failed") or "the step ended without an update"
    note = why.split(". ")[0]  # the rule, without the way out
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def summary(result: Mapping[str, Any]) -> str:
    """The table of the README: the number of algorithms that ran, by family and engine."""
    lines = ["| family | recipe | " + " | ".join(ENGINES) + " |", "|---|---|" + "---|" * len(ENGINES)]
    for family, algorithms in result["cells"].items():
        label, recipe = FAMILIES[family]
        counts = [f"{sum(cells[e]['ran'] for cells in algorithms.values())} of {len(algorithms)}" for e in ENGINES]
        lines.append(f"| {label} | `{recipe}` | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def with_summary(readme: str, result: Mapping[str, Any]) -> str:
    """Returns the README with the new table between its two marks."""
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{summary(result)}\n{END}{tail}"


def render() -> None:
    result = json.loads(RESULT.read_text())
    PAGE.write_text(page(result))
    README.write_text(with_summary(README.read_text(), result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), help="run only these families")
    parser.add_argument("--render", action="store_true", help="write the page and the README only")
    arguments = parser.parse_args()
    if not arguments.render:
        measure(arguments.family or list(FAMILIES))
    render()
    return 0


if __name__ == "__main__":
    sys.exit(main())
