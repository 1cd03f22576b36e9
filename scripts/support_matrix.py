"""Trains every family with every algorithm on every engine at toy scale, and writes which combinations ran.

    OMP_NUM_THREADS=1 python scripts/support_matrix.py                    every cell, one process per row
    OMP_NUM_THREADS=1 python scripts/support_matrix.py --row cells/wan21_t2v tracks/bagel
    python scripts/support_matrix.py --render                             only writes the page and the README again

A cell runs one step at scale=toy of a row's own recipe, overridden by keys of a column and of an engine's recipe. It
counts as run if the step ended with a finite reward, an update, and no gradient that was zero. The page lists the
reasons of the other cells. Nothing on it is edited by hand.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "support_matrix.json"
PAGE = ROOT / "docs" / "support.md"
README = ROOT / "README.md"
RECIPES = ROOT / "examples"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"

FAMILIES: Mapping[str, tuple[str, str]] = {
    "sd3": ("Stable Diffusion 3, 3.5", "diffusion/sd3_trainside"),
    "qwen_image": ("Qwen-Image", "diffusion/qwen_image_trainside"),
    "qwen_image_edit": ("Qwen-Image-Edit", "diffusion/qwen_image_edit_trainside"),
    "flux1": ("FLUX.1-dev", "diffusion/flux1_dev_trainside"),
    "flux2_klein": ("FLUX.2-klein", "diffusion/flux2_klein_trainside"),
    "flux2_klein_edit": ("FLUX.2-klein, editing", "diffusion/flux2_klein_editreward"),
    "z_image": ("Z-Image", "diffusion/z_image_trainside"),
    "lumina2": ("Lumina-Image 2.0", "diffusion/lumina2_trainside"),
    "wan21_t2v": ("Wan 2.1 T2V", "diffusion/wan21_t2v"),
    "wan21_i2v": ("Wan 2.1 I2V", "diffusion/wan21_i2v"),
    "wan22_t2v": ("Wan 2.2 T2V A14B", "diffusion/wan22_t2v_14b"),
    "wan22_i2v": ("Wan 2.2 I2V A14B", "diffusion/wan22_i2v"),
    "wan22_ti2v": ("Wan 2.2 TI2V 5B", "diffusion/wan22_ti2v_5b"),
    "hunyuan_video": ("HunyuanVideo", "diffusion/hunyuan_video_t2v_trainside"),
    "hunyuan_video15": ("HunyuanVideo 1.5", "diffusion/hunyuan_video15_t2v_dancegrpo_trainside"),
    "bagel": ("BAGEL, images", "unified_model/bagel_trainside_lora"),
    "hunyuan_image3": ("HunyuanImage-3, images", "unified_model/hi3_trainside"),
    "nextstep1": ("NextStep-1", "unified_model/nextstep_1_grpo"),
}
"""The label of each family, and its recipe with model, reward and data."""
TOKEN_TRACKS: Mapping[str, tuple[str, str, str]] = {
    "bagel_think": ("BAGEL, track `think`", "unified_model/bagel_think_joint", "think"),
    "hi3_think": ("HunyuanImage-3, track `think`", "unified_model/hi3_think", "think"),
    "hi3_recaption": ("HunyuanImage-3, track `recaption`", "unified_model/hi3_joint", "recaption"),
    "janus_pro": ("Janus-Pro, images", "unified_model/janus_pro_grpo", ""),
}
"""The label of each track of tokens of a unified model, its recipe, and its name in a recipe of several tracks."""
CHAINS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "bagel": ("BAGEL", "unified_model/bagel_think_joint", ("think", "image")),
    "hi3_two": ("HunyuanImage-3", "unified_model/hi3_joint", ("recaption", "image")),
    "hi3_three": ("HunyuanImage-3", "unified_model/hi3_think", ("think", "recaption", "image")),
}
"""The label of each family that samples several tracks, its recipe, and its tracks, which continue each other."""
POLICIES: Mapping[str, tuple[str, str]] = {
    "categorical": ("networks of vectors, discrete actions", "embodied/cartpole_ppo"),
    "gaussian": ("networks of vectors, continuous actions", "embodied/metaworld_reach_ppo"),
    "flow": ("flow policy, chunks of actions", "embodied/quickstart"),
    "decoder": ("decoder of ACT, chunks of actions", "embodied/metaworld_reach_grpo"),
    "steered": ("noise of a frozen flow policy (DSRL)", "embodied/metaworld_reach_dsrl"),
    "pixels": ("networks of images, continuous actions", "embodied/pixel_reach_ppo"),
    "openvla": ("OpenVLA-OFT, chunks of action tokens", "embodied/maniskill_pickcube_ppo_openvla_oft"),
    "pi0": ("pi0, denoised chunks of actions", "embodied/libero_pi0_ppo"),
    "pi0_steered": ("noise of a frozen pi0 (DSRL)", "embodied/libero_pi0_dsrl"),
    "pi05": ("pi0.5, denoised chunks of actions", "embodied/libero_pi05_ppo"),
    "smolvla": ("SmolVLA, denoised chunks of actions", "embodied/libero_smolvla_ppo"),
    "gr00t": ("GR00T N1.5, denoised chunks of actions", "embodied/libero_gr00t_ppo"),
}
"""The label of each kind of policy that acts, and its recipe."""
POLICY_BUNDLES: Mapping[str, Mapping[str, Any]] = {
    "decoder": {
        "_target_": "unirl.models.policies.bundle.ChunkDecoderBundle", "observations": 39, "actions": 4, "chunk": 5,
    },
}  # fmt: skip
"""The bundles of policies that no recipe has, in place of that of their recipe."""
UNGUIDED = {"guidance_scale": 1.0, "guidance_scale_2": None, "init_same_noise": False}
ALGORITHMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Flow-GRPO": ("diffusion/sd3_flowgrpo", {}),
    "DanceGRPO": ("diffusion/sd3_dancegrpo", {}),
    "MixGRPO": ("diffusion/sd3_mixgrpo", {}),
    "GRPO-Guard": ("diffusion/sd3_grpo_guard", {}),
    "Flow-DPPO": ("diffusion/sd3_flowdppo", {}),
    "PPO": ("diffusion/sd3_ppo", {}),
    "DPOK": ("diffusion/sd3_dpok", {}),
    "NFT": ("diffusion/sd3_nft", UNGUIDED),
    "AWM": ("diffusion/sd3_awm", UNGUIDED),
    "RWR": ("diffusion/sd3_rwr", UNGUIDED),
    "DPO": ("diffusion/sd3_online_dpo", UNGUIDED),
    "ReFL": ("diffusion/sd3_refl", {}),
    "DRaFT": ("diffusion/sd3_draft", {}),
    "DRTune": ("diffusion/sd3_drtune", {}),
}
"""The recipe of each algorithm, whose keys override those of the family, and further sampling keys."""
TOKEN_ALGORITHMS: Mapping[str, str] = {
    "GRPO": "llm/quickstart",
    "DAPO": "llm/quickstart_dapo",
    "GSPO": "llm/quickstart_gspo",
    "RLOO": "llm/quickstart_rloo",
    "DRPO": "llm/quickstart_drpo",
    "PPO": "llm/quickstart_ppo",
    "distillation": "llm/quickstart_opd",
}
"""The recipe of each algorithm for tokens."""
ACTION_ALGORITHMS: Mapping[str, str] = {
    "PPO": "embodied/cartpole_ppo",
    "GRPO": "embodied/quickstart",
    "SAC": "embodied/halfcheetah_sac",
    "CrossQ": "embodied/halfcheetah_crossq",
}
"""The recipe of each algorithm for policies that act."""
SCHEDULES = ("joint", "alternating", "equal gradient norms", "equal loss sizes", "images alone", "texts alone")
"""How the tracks of a chain share an update, or which of them are trained."""
TRAINSIDE = {"_target_": "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"}
ENGINES: Mapping[str, str | None] = {
    "trainside": None,
    "replica, colocate": "diffusion/sd3_replica_lora_colocate",
    "replica, separate": "diffusion/sd3_replica_lora_separate",
}
FEW = ("stack.warmup=2",)
FURTHER: Mapping[str, Sequence[str]] = {"SAC": FEW, "CrossQ": FEW}
"""Further settings of a cell by its column: a step with long chunks of actions has few decisions to store."""
OF_ALGORITHM = ("backend", "advantage", "algorithm", "stack", "sampling")
OF_TOKENS = ("advantage", "refill")
OF_ACTIONS = ("advantage", "algorithm")
OF_FAMILY = ("height", "width", "num_frames", "guidance_scale", "num_inference_steps", "max_sequence_length")
OF_ENGINE = ("num_devices", "placement", "rollout", "sync")
SETTINGS = ("scale=toy", "num_rollouts=1", "evaluation.eval_steps=0", "tracking.sample_steps=0", "save_interval=0")
OPENING = """\
<!-- Written by a script, not by hand: .venv/bin/python scripts/support_matrix.py --render -->
# Support: families, algorithms, engines

`OMP_NUM_THREADS=1 .venv/bin/python scripts/support_matrix.py` tried {count} combinations at toy scale and wrote this
page. Each combination takes the recipe of a row, replaces its keys by those of a column and of an engine, and does one
step of the training loop. The models are tiny, have random weights, and use the same classes as the full models. A cell
is **yes** only if the step ended with a finite reward, an update and no gradient that was zero. This page says nothing
about models of full size. The card of each recipe states what was run at full size. [Engines](engines.md) has a table
of the engines that are servers (SGLang, vLLM, vLLM-Omni), which are not in these tables.

Each engine has four tables: the images and videos of each family; the tokens of unified models, track by track, while
their other tracks are trained as in the recipe; the tracks of unified models together, with the updates of
[unified models](unified_models.md); and [policies that act](embodied.md).

{measured}"""


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
    folder = recipe.rpartition("/")[0]
    parents = [name for name in content.pop("defaults", []) if name != "_self_"]
    return (f"{folder}/{parents[0]}", content) if parents else (recipe, {})


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


def algorithm_keys(family: str, algorithm: str) -> tuple[str, dict[str, Any]]:
    """The recipe of a family, and the keys of an algorithm for images."""
    recipe, sampling = ALGORITHMS[algorithm]
    return FAMILIES[family][1], merged(own_keys(recipe, OF_ALGORITHM), {"sampling": dict(sampling)} if sampling else {})


def token_keys(row: str, algorithm: str) -> tuple[str, dict[str, Any]]:
    """The recipe of a track of tokens, and the keys of an algorithm for them."""
    _, recipe, track = TOKEN_TRACKS[row]
    whole, variant = lineage(TOKEN_ALGORITHMS[algorithm])
    body = merged(yaml.safe_load((RECIPES / f"{whole}.yaml").read_text()), variant)
    updates = {key: value for key, value in body["stack"].items() if key == "num_updates_per_batch"}
    snapshots = {key: value for key, value in body["backend"].items() if key == "snapshots"}
    blocks = {key: body[key] for key in OF_TOKENS if key in body} | ({"backend": snapshots} if snapshots else {})
    loss = {track: body["algorithm"]} if track else body["algorithm"]
    return recipe, {**blocks, "algorithm": loss, **({"stack": updates} if updates else {})}


def action_keys(row: str, algorithm: str) -> tuple[str, dict[str, Any]]:
    """The recipe of a kind of policy, and the keys of an algorithm for it."""
    recipe = POLICIES[row][1]
    source = yaml.safe_load((RECIPES / f"{ACTION_ALGORITHMS[algorithm]}.yaml").read_text())
    group = source["sampling"].get("samples_per_prompt", 1)
    keys = {key: source[key] for key in OF_ACTIONS if key in source}
    keys["stack"] = {"_target_": "unirl.train.stack.TrainStack"} | source["stack"]
    keys["sampling"] = {"samples_per_prompt": group}
    whole, variant = lineage(recipe)
    own = merged(yaml.safe_load((RECIPES / f"{whole}.yaml").read_text()), variant)["bundle"]
    if row in POLICY_BUNDLES:
        keys["bundle"] = POLICY_BUNDLES[row]
    elif source["bundle"].get("squashed") and own["_target_"] == source["bundle"]["_target_"]:
        keys["bundle"] = {"squashed": True}
    return recipe, keys


def schedule_keys(row: str, schedule: str) -> tuple[str, dict[str, Any]]:
    """The recipe of a chain of tracks, and the keys of a schedule."""
    _, recipe, tracks = CHAINS[row]
    keys: Mapping[str, dict[str, Any]] = {
        "joint": {},
        "alternating": {"stack": {"schedule": "alternating"}},
        "equal gradient norms": {"stack": {"balance": "gradient_norm"}},
        "equal loss sizes": {"stack": {"balance": "uncertainty"}},
        "images alone": {"trained": [tracks[-1]]},
        "texts alone": {"trained": list(tracks[:-1])},
    }
    return recipe, keys[schedule]


@dataclass(frozen=True)
class Section:
    """One table of each engine."""

    title: str
    first: str
    """The heading of its first column."""
    labels: Mapping[str, str]
    columns: Sequence[str]
    keys: Callable[[str, str], tuple[str, dict[str, Any]]]
    """The recipe of a row, and the keys of a column."""


SECTIONS: Mapping[str, Section] = {
    "cells": Section(
        "Images and videos",
        "family",
        {row: label for row, (label, _) in FAMILIES.items()},
        tuple(ALGORITHMS),
        algorithm_keys,
    ),
    "tokens": Section(
        "Tokens of unified models",
        "track",
        {row: label for row, (label, _, _) in TOKEN_TRACKS.items()},
        tuple(TOKEN_ALGORITHMS),
        token_keys,
    ),
    "tracks": Section(
        "Tracks of unified models together",
        "tracks",
        {row: f"{label}: {', '.join(f'`{track}`' for track in tracks)}" for row, (label, _, tracks) in CHAINS.items()},
        SCHEDULES,
        schedule_keys,
    ),
    "actions": Section(
        "Policies that act",
        "policy",
        {row: label for row, (label, _) in POLICIES.items()},
        tuple(ACTION_ALGORITHMS),
        action_keys,
    ),
}
"""The tables by their names in the result file."""


def cell_recipe(section: str, row: str, column: str, engine: str, folder: Path) -> str:
    """Writes a recipe below `folder` that combines the three, and returns its name."""
    recipe, keys = SECTIONS[section].keys(row, column)
    engine_recipe = ENGINES[engine]
    whole, variant = lineage(recipe)
    own = yaml.safe_load((RECIPES / f"{whole}.yaml").read_text())
    # The recipe of a family may have a replica, which `trainside` replaces.
    samples = {"rollout": dict(TRAINSIDE), "sync": None} if "sync" in own and engine_recipe is None else {}
    body = merged(variant, keys, own_keys(engine_recipe, OF_ENGINE) if engine_recipe else samples)
    domain, _, base = whole.partition("/")
    name = re.sub(r"\W+", "_", f"{section} {row} {column} {engine}".lower())
    text = yaml.safe_dump({"defaults": [base, "_self_"], **body}, sort_keys=False)
    path = folder / domain / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{text}")
    return f"{domain}/{name}"


def run_cell(section: str, row: str, column: str, engine: str) -> dict[str, Any]:
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
            name = cell_recipe(section, row, column, engine, folder / "recipes")
            recipe = load(
                name,
                [*SETTINGS, *FURTHER.get(column, ()), f"run.dir={folder / 'run'}"],
                (folder / "recipes", *search_path()),
            )
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
        metrics = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    # Alternating tracks have a gradient each.
    norms = [value for name, value in metrics.items() if name.endswith("train/grad_norm")]
    seen = {"reward_mean": metrics.get("rollout/reward_mean"), "grad_norm": min(norms, default=None)}
    values = [seen["reward_mean"], *norms]
    ran = all(isinstance(value, float) and math.isfinite(value) for value in values) and min(norms, default=0.0) > 0
    return {"ran": ran, **seen, "seconds": round(time.perf_counter() - start, 1)}


def run_row(section: str, row: str) -> dict[str, Any]:
    """Runs all cells of a row, and returns them by column and engine."""
    cells: dict[str, Any] = {}
    for column in SECTIONS[section].columns:
        cells[column] = {engine: run_cell(section, row, column, engine) for engine in ENGINES}
        words = ", ".join("yes" if cell["ran"] else "no" for cell in cells[column].values())
        print(f"{row:18} {column:20} {words}", flush=True)
    return cells


def all_rows() -> list[str]:
    """`section/row` of every row."""
    return [f"{section}/{row}" for section, each in SECTIONS.items() for row in each.labels]


def measure(rows: Sequence[str]) -> None:
    """Runs the cells of `rows` and updates them in the result file."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    context = multiprocessing.get_context("spawn")
    for name in rows:
        section, _, row = name.partition("/")
        with context.Pool(1) as pool:  # a separate process, so that its memory is freed
            cells = pool.apply(run_row, (section, row))
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
        result.setdefault("measured", {})[name] = f"on {date.today()} at commit {commit.stdout.strip()} with {machine}"
        known = result.get(section, {}) | {row: cells}
        result[section] = {each: known[each] for each in SECTIONS[section].labels if each in known}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def page(result: Mapping[str, Any]) -> str:
    """The text of docs/support.md."""
    count = sum(len(each.labels) * len(each.columns) * len(ENGINES) for each in SECTIONS.values())
    parts = [OPENING.format(count=count, measured=_measured(result["measured"]))]
    notes: list[str] = []
    for engine in ENGINES:
        parts.append(f"## {engine[0].upper()}{engine[1:]}")
        for name, section in SECTIONS.items():
            parts.append(f"### {section.title}\n\n" + "\n".join(_table(section, result[name], engine, notes)))
    reasons = "\n".join(f"{i + 1}. {note}" for i, note in enumerate(notes))
    refusals = f"## Reasons\n\nThese are the recorded messages of `unirl check` or of the run:\n\n{reasons}"
    parts.append(refusals if notes else "Every cell ran.")
    return "\n\n".join(parts) + "\n"


def _measured(rows: Mapping[str, str]) -> str:
    """When the rows were measured: a line for each time, that of the most rows first. Rows of other times are named."""
    times: dict[str, list[str]] = {}
    for name, when in rows.items():
        section, _, row = name.partition("/")
        times.setdefault(when, []).append(SECTIONS[section].labels[row])
    first, *others = sorted(times, key=lambda when: -len(times[when]))
    if not others:
        return f"Measured {first}."
    later = [f"- {when}: {'; '.join(times[when])}" for when in others]
    return "\n".join(["Measured", "", f"- {first}: all rows that are not named below", *later])


def _table(section: Section, rows: Mapping[str, Any], engine: str, notes: list[str]) -> Iterator[str]:
    yield f"| {section.first} | " + " | ".join(section.columns) + " |"
    yield "|---|" + "---|" * len(section.columns)
    for row, cells in rows.items():
        marks = [_mark(cells[name][engine], notes) for name in section.columns]
        yield f"| {section.labels[row]} | " + " | ".join(marks) + " |"


def _mark(cell: Mapping[str, Any], notes: list[str]) -> str:
    if cell["ran"]:
        return "yes"
    why = cell.get("refused") or cell.get("failed") or "the step ended without an update"
    note = why.split(". ")[0]  # the rule, without the way out
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def summary(result: Mapping[str, Any]) -> str:
    """The table of the README: the number of algorithms or schedules that ran, by row and engine."""
    lines = ["| model | recipe | " + " | ".join(ENGINES) + " |", "|---|---|" + "---|" * len(ENGINES)]
    for name, section in SECTIONS.items():
        for row, columns in result[name].items():
            counts = [f"{sum(cells[e]['ran'] for cells in columns.values())} of {len(columns)}" for e in ENGINES]
            recipe, _ = section.keys(row, section.columns[0])
            lines.append(f"| {section.labels[row]} | `{recipe}` | " + " | ".join(counts) + " |")
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
    parser.add_argument("--row", nargs="+", choices=all_rows(), metavar="SECTION/ROW", help="run only these rows")
    parser.add_argument("--render", action="store_true", help="write the page and the README only")
    arguments = parser.parse_args()
    if not arguments.render:
        measure(arguments.row or all_rows())
    render()
    return 0


if __name__ == "__main__":
    sys.exit(main())
