"""Writes docs/models.md, a page about all families of image and video models, from their facts and configurations.

python scripts/model_page.py            # about half a minute; reads no weights and needs no connection
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from unirl.models.loading.checkpoint import RANDOM, TOY, DiffusersFamily
from unirl.models.loading.estimate import ModelEstimate
from unirl.sde.guidance import (
    EmbeddedGuidance,
    ExpertGuidance,
    Guidance,
    LineNormGuidance,
    NoGuidance,
    NormCorrectedGuidance,
    RenormGuidance,
)
from unirl.types.facts import LatentFacts

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
OPENING = """\
<!-- This page is generated. To change it, run: .venv/bin/python scripts/model_page.py -->
# Image and video models

Each family adapts one model of diffusers to the denoising loop that all families share. Tests compare a toy of the same
classes with diffusers' own pipeline, and BAGEL and HunyuanImage-3, which it does not have, with the published equations
([what runs](support.md), [how to add a family](extending.md)). The sizes below are counted from the public
configurations. **Published weights were never loaded here, and nothing ran on a GPU yet.**

`unirl models pull ID` shows the sizes of the files that a run reads and downloads them. `unirl models check DIR`
compares a model directory with its networks without loading it. With `--values` it also looks for infinite values and
NaN. Weights are read from files named `model.safetensors` or `diffusion_pytorch_model.safetensors`, whole or split,
without a variant such as `fp16`. Single-file checkpoints are refused: load one with `from_single_file` of its pipeline
in diffusers, and give the directory that `save_pretrained` writes.

`backend.lora_cfg.path` is a LoRA file, or the folder of one, from which the adapters of a run start: an export of a
run, a file of diffusers, or a folder of PEFT with its `adapter_config.json`. If diffusers has a converter for the
family, it may also be a file of kohya, musubi-tuner or ComfyUI (FLUX.1, FLUX.2, Qwen-Image, Wan, Z-Image, HunyuanVideo,
Lumina 2). Each tensor must reach a layer, and each alpha is applied. `lora_cfg.rank` may be larger than the rank of the
file, and the layers of the file must be among `lora_cfg.target_modules`. Adapters of text encoders are refused. A
continued run, and `unirl export` or `sample` of it, read the adapters of the checkpoint, and do not need the file.

`bundle.path` in a recipe is one of these hub ids, a directory in the diffusers layout (in the published layout for
BAGEL and HunyuanImage-3), or `toy`. `guidance_scale`
always means w in v_uncond + w (v_cond - v_uncond), and 1 means off; a distilled model with embedded guidance reads the
scale as an input. Sides are in pixels. A side that does not fit is refused with the nearest ones that do."""
GUIDANCE: Mapping[type, str] = {
    Guidance: "classic",
    NormCorrectedGuidance: "norm-corrected",
    LineNormGuidance: "norm-rescaled per line",
    RenormGuidance: "renormalised",
    EmbeddedGuidance: "embedded",
    ExpertGuidance: "per expert",
    NoGuidance: "none (distilled)",
}


def families() -> list[DiffusersFamily]:
    """Returns the families of all folders with a `family.py`."""
    families_by_name: dict[str, DiffusersFamily] = {}
    for path in sorted((ROOT / "unirl" / "models").glob("*/family.py")):
        module = importlib.import_module(f"unirl.models.{path.parent.name}.family")
        families_by_name |= {value.name: value for value in vars(module).values() if isinstance(value, DiffusersFamily)}
    return list(families_by_name.values())


def page() -> str:
    """The text of the page."""
    parts = [OPENING]
    for family in families():
        parts.append(f"## {family.name}\n\n" + "\n".join(_table(family)))
        parts.append("\n".join(_notes(family)))
    return "\n\n".join(parts) + "\n"


def _table(family: DiffusersFamily) -> Iterator[str]:
    yield "| checkpoint | trained | encoders and VAE | sides | latents | frames | guidance | condition images |"
    yield "|---|---|---|---|---|---|---|---|"
    for path in family.published:
        estimate = family.estimate(path)
        facts = estimate.facts
        assert isinstance(facts, LatentFacts)
        guidance = GUIDANCE[type(facts.guidance)]
        cells = [f"`{path}`", *_sizes(estimate), *_shape(facts), guidance, _condition_images(facts)]
        yield "| " + " | ".join(cells) + " |"


def _sizes(estimate: ModelEstimate) -> tuple[str, str]:
    trained = estimate.parameters[estimate.facts.trainable_attr]
    frozen = sum(estimate.parameters.values()) - trained
    return f"{trained / 1e9:.2f} B", f"{frozen / 1e9:.2f} B"


def _shape(facts: LatentFacts) -> tuple[str, str, str]:
    scale, patch = facts.vae_scale, facts.patch_size
    frames = "1" if facts.frame_scale is None else f"{facts.frame_scale} n + 1"
    latent_frames = "" if facts.frame_scale is None else " x (n + 1)"
    return f"multiples of {scale * patch}", f"{facts.latent_channels}{latent_frames} x H/{scale} x W/{scale}", frames


def _condition_images(facts: LatentFacts) -> str:
    fewest, most = facts.condition_images
    if most is None:
        return f"{fewest} or more"
    return "none" if not most else str(most) if fewest == most else f"{fewest} to {most}"


def _notes(family: DiffusersFamily) -> Iterator[str]:
    facts = family.facts(family.toys[TOY], 1)
    pipelines = _quoted((family.pipeline, *family.further_pipelines)) if family.pipeline else "none"
    toys = _quoted([name for name in family.toys if not name.startswith(RANDOM)])
    yield f"- pipelines of diffusers: {pipelines}; toys: {toys}"
    yield f"- default LoRA targets: {_quoted(facts.lora_targets)}"
    yield f"- blocks that are sharded, checkpointed and compiled one by one: {_quoted(facts.block_class_names)}"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
