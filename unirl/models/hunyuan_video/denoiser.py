"""HunyuanVideo's transformer as a velocity field. Kong et al. 2024 (arXiv:2412.03603)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.sde.guidance import GUIDANCE
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition

GUIDANCE_SCALE = 1000.0
"""The network reads an embedded scale in thousandths."""


class HunyuanVideoDenoiser:
    """One forward of the transformer."""

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' HunyuanVideoTransformer3DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given `text` and, if distilled, `guidance`."""
        text, scale = conditions["text"], conditions.get(GUIDANCE)
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        assert scale is None or isinstance(scale, ScaleCondition)
        dtype = self.transformer.x_embedder.proj.weight.dtype
        v = self.transformer(
            hidden_states=x.to(dtype),
            # fp32: 1000 sigma does not fit in the 8 bits of bf16
            timestep=self.timestep_scale * sigma,
            encoder_hidden_states=text.embeds.to(dtype),
            encoder_attention_mask=text.mask,
            pooled_projections=text.pooled.to(dtype),
            # rounded as in diffusers: bf16 makes 6016 of 6000
            guidance=None if scale is None else scale.scale.to(dtype) * GUIDANCE_SCALE,
            return_dict=False,
        )[0]
        return v.float()
