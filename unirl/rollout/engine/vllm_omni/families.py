"""The model families that the engine samples with vLLM-Omni, by `ModelFacts.family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unirl.rollout.engine.serving.latent_server import LatentFamily


@dataclass(frozen=True)
class OmniFamily(LatentFamily):
    """One family."""

    pipeline: str
    """The class of its pipeline in vLLM-Omni."""


FAMILIES: Mapping[str, OmniFamily] = {
    "sd3": OmniFamily("StableDiffusion3Pipeline"),
    "hunyuan_video15": OmniFamily("HunyuanVideo15Pipeline", sequence_length=1000),
}
