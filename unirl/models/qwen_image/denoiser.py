"""The MMDiT of Qwen-Image as a velocity field. Wu et al. 2025 (arXiv:2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.types.conditions import Conditions, TextEmbedCondition


class QwenImageDenoiser:
    """One forward of the transformer."""

    def __init__(self, transformer: Any, patch_size: int) -> None:
        self.transformer = transformer  # diffusers' QwenImageTransformer2DModel, which has no types
        self.patch_size = patch_size

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition)
        images = [x, *self.references(conditions)]
        tokens = [packed(image, self.patch_size) for image in images]
        grid = [(1, p.shape[-2] // self.patch_size, p.shape[-1] // self.patch_size) for p in images]
        dtype = self.transformer.img_in.weight.dtype
        v = self.transformer(
            hidden_states=torch.cat(tokens, dim=1).to(dtype),
            timestep=sigma,  # the network rounds it to its dtype, as in its own pipeline
            encoder_hidden_states=text.embeds.to(dtype),
            encoder_hidden_states_mask=text.mask,
            img_shapes=[grid] * len(x),
            return_dict=False,
        )[0]
        return unpacked(v[:, : tokens[0].shape[1]].float(), x.shape, self.patch_size)

    def references(self, conditions: Conditions) -> Sequence[Tensor]:
        """Latents [B, C, H, W] of each image that stands as tokens after the sample's: there are none."""
        return ()


def packed(latents: Tensor, patch_size: int) -> Tensor:
    """[B, H W / p^2, C p^2] of latents [B, C, H, W]: a token's numbers in the order channel, row, column."""
    p = patch_size
    patches = latents.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [B, C, H/p, p, W/p, p]
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpacked(tokens: Tensor, shape: torch.Size, patch_size: int) -> Tensor:
    """Latents of `shape` [B, C, H, W] of their tokens."""
    batch, channels, height, width = shape
    p = patch_size
    patches = tokens.reshape(batch, height // p, width // p, channels, p, p)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(shape)
