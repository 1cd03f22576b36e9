"""The model families that the engine samples with vLLM-Omni, by `ModelFacts.family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OmniFamily:
    """One family."""

    pipeline: str
    """The class of its pipeline in vLLM-Omni."""
    sequence_length: int | None = None
    """The number of text tokens that the server always encodes. None: that of the request."""


FAMILIES: Mapping[str, OmniFamily] = {
    "sd3": OmniFamily("StableDiffusion3Pipeline"),
    "hunyuan_video15": OmniFamily("HunyuanVideo15Pipeline", sequence_length=1000),
}
