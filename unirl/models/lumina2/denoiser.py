"""The transformer of Lumina-Image 2.0 as a velocity field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.types.conditions import Conditions, TextEmbedCondition


class Lumina2Denoiser:
    """One forward of the transformer per row."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' Lumina2Transformer2DModel, which has no types

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        dtype = self.transformer.x_embedder.weight.dtype
        embeds, latents = text.embeds.to(dtype), x.to(dtype)
        clock = 1.0 - sigma  # its time is 0 at noise and 1 at images, and its velocity points there
        # Row by row: the transformer pads a batch to its longest prompt, so a row's bits would depend on the others.
        velocities = [
            self.transformer(
                hidden_states=latents[i : i + 1],
                timestep=clock[i : i + 1],
                encoder_hidden_states=embeds[i : i + 1],
                encoder_attention_mask=text.mask[i : i + 1],
                return_dict=False,
            )[0]
            for i in range(len(x))
        ]
        return -torch.cat(velocities).float()
