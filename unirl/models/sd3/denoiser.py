"""The MMDiT of Stable Diffusion 3 as a velocity field. Esser et al. 2024 (arXiv:2403.03206)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.types.conditions import Conditions, TextEmbedCondition


class SD3Denoiser:
    """One forward of the transformer."""

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' SD3Transformer2DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        dtype = self.transformer.pos_embed.proj.weight.dtype
        v = self.transformer(
            hidden_states=x.to(dtype),
            # fp32: 1000 sigma does not fit in the 8 bits of bf16
            timestep=self.timestep_scale * sigma,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            return_dict=False,
        )[0]
        return v.float()
