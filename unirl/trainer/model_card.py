"""The model card of an export: README.md, which the hub shows, beside the exported weights."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import unirl
from unirl.config.node import nodes_below
from unirl.models.loading.hub import CONFIG, HUB_ID, MODEL_INDEX
from unirl.tracking.run_directory import REMARKS
from unirl.trainer.run_folder import SavedRun

CARD = "README.md"
OPTIONAL = ("feature_extractor", "image_encoder")
"""Components that diffusers' pipelines do without."""
OWN_LAYOUT = "unirl"
"""In place of a library, for a model whose publisher has a layout and code of its own."""


def write_card(folder: Path, saved: SavedRun, format: str, difference: float | None, weights: str = "live") -> Path:
    """Writes the card of an export in a folder, and returns its path.

    Args:
        difference: largest difference between our sampler and the home library with the files; None if not compared.
        weights: `live`, or the snapshot that was exported.
    """
    path = folder / CARD
    library = _library(folder, format)
    base = saved.recipe.config.model_path
    lines = [*_front_matter(library, format, base), *_about(saved, weights), *_use(folder, library, format, base)]
    lines += _limits(difference)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _front_matter(library: str, format: str, base: str | None) -> Iterator[str]:
    yield "---"
    yield f"library_name: {library}"
    if base is not None and HUB_ID.fullmatch(base) and not Path(base).exists():
        yield f"base_model: {base}"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("unirl", "reinforcement-learning", *(["lora"] if format != "full" else [])))
    yield "---"
    yield ""


def _about(saved: SavedRun, weights: str) -> Iterator[str]:
    config = saved.recipe.config
    recipe, step = _recipe_name(saved), saved.checkpoint.step
    shown = "the trained weights" if weights == "live" else f"the weights of the snapshot `{weights}`"
    yield f"# {recipe.rpartition('/')[2]}, step {step}"
    yield ""
    yield f"Trained with reinforcement learning by UniRL {unirl.__version__}; these are {shown}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| base model | `{_public_name(config.model_path)}` |"
    yield f"| recipe | `{recipe}` |"
    yield f"| algorithm | `{config.algorithm.class_name}` |"
    yield f"| reward | {', '.join(f'`{name}`' for name in _rewards(saved))} |"
    yield f"| steps | {step} of {config.data_prompts} prompts, seed {config.seed} |"
    yield from (f"| {name} | {value} |" for name, value in _scores(saved))
    if saved.scale in REMARKS:
        yield f"| note | {REMARKS[saved.scale]} |"
    yield ""


def _public_name(path: str | None) -> str | None:
    """A hub id, or the last part of a local path, since a card may be published."""
    return Path(path).name if path is not None and Path(path).exists() else path


def _class_of(folder: Path) -> str | None:
    """The class of transformers that loads the network with its head, by its config.json. None if it has no such."""
    classes = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    name = str(classes[0]) if classes else ""
    return name if getattr(importlib.import_module("transformers"), name, None) is not None else None


def _is_built_in(path: str | None) -> bool:
    """True for a model of UniRL's own, such as `toy`, which no other library can load by its name."""
    return path is not None and "/" not in path and not Path(path).exists()


def _use(folder: Path, library: str, format: str, base: str | None) -> Iterator[str]:
    yield "## Use"
    yield ""
    if format != "full" and _is_built_in(base):
        yield f"The base model `{base}` is built into UniRL and is not on the hub. For a model that needs no base"
        yield "model, export the run with `unirl export RUN --format full`."
        yield ""
        return
    if library == OWN_LAYOUT:
        yield "This folder has the files of the published repository. Give it to the published code of the model, or as"
        yield "`bundle.path` to UniRL."
        yield ""
        return
    yield "```python"
    if format == "diffusers-lora":
        yield "from diffusers import DiffusionPipeline"
        yield ""
        yield f"pipe = DiffusionPipeline.from_pretrained({_public_name(base)!r})"
        yield 'pipe.load_lora_weights(".")  # this folder, or its id on the hub'
    elif format == "peft":
        yield "from peft import PeftModel"
        yield ""
        yield f'model = PeftModel.from_pretrained(base, ".")  # base: the trained network of {_public_name(base)!r}'
    else:
        kind = "DiffusionPipeline" if library == "diffusers" else str(_class_of(folder))
        yield f"from {library} import {kind}"
        yield ""
        yield from _load_full(folder, kind)
    yield "```"
    yield ""


def _load_full(folder: Path, kind: str) -> Iterator[str]:
    """The lines that load a whole model. diffusers needs an explicit None for a component that the model lacks."""
    absent = _absent_components(folder)
    if absent:
        yield f"absent = dict.fromkeys({absent})  # the model has none of these"
    yield f'model = {kind}.from_pretrained("."{", **absent" if absent else ""})  # this folder, or its id on the hub'


def _absent_components(folder: Path) -> list[str]:
    """The networks and tokenizers that the pipeline's class has and this model lacks."""
    if not (folder / MODEL_INDEX).is_file():
        return []
    index = json.loads((folder / MODEL_INDEX).read_text(encoding="utf-8"))
    return [name for name, value in index.items() if value == [None, None] and name not in OPTIONAL]


def _limits(difference: float | None) -> Iterator[str]:
    yield "## What was checked"
    yield ""
    if difference is None:
        yield "The files were written, but not loaded again and compared."
    else:
        yield f"The files were loaded and compared with the sampler of training: largest difference {difference:.1e}."
    yield ""
    yield "Nothing else was assessed. A reward can be raised without better samples: look at some before you use the"
    yield "weights. The licence of the base model applies."


def _library(folder: Path, format: str) -> str:
    """The library that loads an export."""
    if format == "full":
        if (folder / MODEL_INDEX).is_file():
            return "diffusers"
        is_known = (folder / CONFIG).is_file() and _class_of(folder) is not None
        return "transformers" if is_known else OWN_LAYOUT
    return "peft" if format == "peft" else "diffusers"


def _recipe_name(saved: SavedRun) -> str:
    """The name of the recipe that began the run, or that of the checkpoint if the run directory does not say it."""
    try:
        return str(json.loads((_root(saved) / "run.json").read_text())["recipe"])
    except (OSError, KeyError, json.JSONDecodeError):
        return saved.recipe.file.name


def _rewards(saved: SavedRun) -> list[str]:
    """The class names of the scorers."""
    names = [node.class_name for node in nodes_below(saved.recipe.config.reward)]
    scorers = [name for name in names if name.endswith("Scorer")]
    return scorers or names


def _scores(saved: SavedRun) -> Iterator[tuple[str, str]]:
    """The held-out rewards of the first evaluation and of the last one up to the checkpoint."""
    results = []
    for path in sorted(_root(saved).glob("eval/step-*/scores.json")):
        scores = json.loads(path.read_text())
        if scores["step"] <= saved.checkpoint.step:
            results.append(scores)
    for scores in [*results[:1], *results[1:][-1:]]:
        metrics = scores["metrics"]
        mean, error = float(metrics["eval/reward_mean"]), float(metrics["eval/reward_stderr"])
        yield f"held-out reward after step {scores['step']}", f"{mean:.3f} +- {error:.3f}"


def _root(saved: SavedRun) -> Path:
    return saved.checkpoint.path.parent.parent
