"""The model card of an export: README.md, which the hub shows, beside the exported weights."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import unirl
from unirl.config.node import nodes_below
from unirl.models.loading.base_model import OWN_LAYOUT, BaseModel
from unirl.models.loading.hub import CONFIG, HUB_ID, MODEL_INDEX
from unirl.tracking.record import RunRecord
from unirl.tracking.run_directory import REMARKS
from unirl.trainer.run_folder import SavedRun

CARD = "README.md"
OPTIONAL = ("feature_extractor", "image_encoder")
"""Components that diffusers' pipelines do without."""


def write_card(
    folder: Path, saved: SavedRun, format: str, difference: float | None, base: BaseModel, weights: str = "live"
) -> Path:
    """Writes the card of an export in a folder, and returns its path.

    Args:
        difference: largest difference between our sampler and the home library with the files; None if not compared.
        base: the model before training.
        weights: `live`, or the snapshot that was exported.
    """
    path, name = folder / CARD, saved.recipe.config.model_path
    library = _library(folder, format)
    use = _use_full(folder, library) if format == "full" else _use_adapter(base, format, name)
    lines = [*_front_matter(library, format, name), *_about(saved, weights), "## Use", "", *use, ""]
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


def _use_full(folder: Path, library: str) -> Iterator[str]:
    """The lines that load a whole model from the current folder."""
    if library == OWN_LAYOUT:
        yield "This folder has the files of the published repository. Give it to the published code of the model, or as"
        yield "`bundle.path` to UniRL."
        return
    kind = "DiffusionPipeline" if library == "diffusers" else str(_class_of(folder))
    absent = _absent_components(folder)
    yield "```python"
    yield f"from {library} import {kind}"
    yield ""
    yield from _absent_lines(absent)
    yield f'model = {kind}.from_pretrained("."{_passed(absent)})  # this folder, or its id on the hub'
    yield "```"
    yield from _without_vae(absent)


def _use_adapter(base: BaseModel, format: str, name: str | None) -> Iterator[str]:
    """The lines that load an adapter from the current folder onto its base model.

    Args:
        name: hub id, folder or built-in name of the base model.
    """
    if base.is_toy:
        yield f"The base model `{name}` has random weights and exists only inside of UniRL. For a model that needs no"
        yield "base model, export the run with `unirl export RUN --format full`."
        return
    if base.library == OWN_LAYOUT:
        yield f"The adapter belongs to the network of `{_public_name(name)}`. peft loads it onto that of the published"
        yield 'code, `PeftModel.from_pretrained(network, ".")`, and UniRL with `backend.lora_cfg.path=<this folder>`.'
        return
    absent = [] if base.shipped is None else _absent_components(base.shipped)
    yield "```python"
    yield from _imports(base, format)
    yield ""
    yield _base_line(base, name)
    yield from _absent_lines(absent)
    if base.library == "transformers":
        yield f'model = PeftModel.from_pretrained({base.loader}.from_pretrained(base), ".")  # this folder, or its id'
    else:
        yield f"pipe = {base.loader}.from_pretrained(base{_passed(absent)})"
        adapted = f"pipe.{base.component}"
        yield from (
            [f'{adapted} = PeftModel.from_pretrained({adapted}, ".")  # this folder, or its id on the hub']
            if format == "peft"
            else base.lora_lines
        )
    yield "```"
    yield from _without_vae(absent)


def _imports(base: BaseModel, format: str) -> Iterator[str]:
    if base.shipped is not None:
        yield from ("from pathlib import Path", "", "import unirl")
    if base.library == "diffusers":
        yield f"from diffusers import {base.loader}"
    if format == "peft":
        yield "from peft import PeftModel"
    if base.library == "transformers":
        yield f"from transformers import {base.loader}"


def _base_line(base: BaseModel, name: str | None) -> str:
    if base.shipped is not None:
        place = base.shipped.relative_to(Path(unirl.__file__).parent).as_posix()
        return f'base = Path(unirl.__file__).parent / "{place}"  # it comes with UniRL'
    is_local = name is not None and Path(name).exists()
    return f'base = "{_public_name(name)}"' + "  # the folder of the base model" * is_local


def _absent_lines(absent: Sequence[str]) -> Iterator[str]:
    """diffusers needs an explicit None for a component that the model lacks."""
    if absent:
        yield f"absent = dict.fromkeys({list(absent)})  # the model has none of these"


def _passed(absent: Sequence[str]) -> str:
    return ", **absent" if absent else ""


def _without_vae(absent: Sequence[str]) -> Iterator[str]:
    if "vae" in absent:
        yield ""
        yield "The model has no VAE: its latents are pixels. `unirl/models/sd3/quickstart/README.md` of UniRL has the"
        yield "lines that draw an image with it."


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
    results = [row for row in RunRecord(_root(saved)).evaluations if row["step"] <= saved.checkpoint.step]
    for row in [*results[:1], *results[1:][-1:]]:
        mean, error = row["eval/reward_mean"], row["eval/reward_stderr"]
        yield f"held-out reward after step {row['step']:.0f}", f"{mean:.3f} +- {error:.3f}"


def _root(saved: SavedRun) -> Path:
    return saved.checkpoint.path.parent.parent
