"""The model families that the engine samples with vLLM-Omni, by `ModelFacts.family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unirl.rollout.engine.serving.latent_server import LatentFamily


@dataclass(frozen=True)
class OmniFamily(LatentFamily):
    """One family.

    The names of its weights need no table: those of diffusers lead to vLLM-Omni's by program/weights.py.
    """

    pipeline: str
    """The class of its pipeline in vLLM-Omni, or the name by which vLLM-Omni knows the class."""
    settings: tuple[str, ...] = ()
    """Settings of model_index.json that vLLM-Omni takes as fields of `OmniDiffusionConfig`, if the model has them."""


FAMILIES: Mapping[str, OmniFamily] = {
    "sd3": OmniFamily("StableDiffusion3Pipeline"),
    "qwen_image": OmniFamily("QwenImagePipeline", token_side=2, blank=" "),
    "hunyuan_video15": OmniFamily("HunyuanVideo15Pipeline", sequence_length=1000),
    "wan21": OmniFamily("WanPipeline", blank=" "),
    "wan22": OmniFamily("WanPipeline", blank=" ", settings=("boundary_ratio",)),
}
