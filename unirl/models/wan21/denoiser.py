"""The transformer of Wan as a velocity field. Wan 2025 (arXiv:2503.20314)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.types.conditions import Conditions, LatentCondition, TextEmbedCondition, VisionCondition

FIRST_FRAME, VISION = "image", "vision"
"""Conditions: latents that stand beside the video's, and what CLIP says of the first frame."""


class WanDenoiser:
    """One forward of the transformer.

    It is fed 1000 sigma as it is, in fp32. diffusers' UniPC cuts that to an integer; its Euler scheduler does not.
    """

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' WanTransformer3DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given `text` and what a first frame gave."""
        v: Tensor = self.transformer(**self.inputs(x, sigma, conditions), return_dict=False)[0]
        return v.float()

    def inputs(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> dict[str, Tensor | None]:
        """What the transformer is called with."""
        text, shown, vision = (conditions.get(name) for name in ("text", FIRST_FRAME, VISION))
        assert isinstance(text, TextEmbedCondition)
        if isinstance(shown, LatentCondition):
            x = torch.cat([x, shown.latents.to(x)], dim=1)
        dtype = self.dtype
        return {
            "hidden_states": x.to(dtype),
            "timestep": self.timestep_scale * sigma,
            "encoder_hidden_states": text.embeds.to(dtype),
            "encoder_hidden_states_image": vision.embeds.to(dtype) if isinstance(vision, VisionCondition) else None,
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices: norms and tables may be wider."""
        found: torch.dtype = self.transformer.patch_embedding.weight.dtype
        return found
