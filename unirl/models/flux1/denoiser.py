"""The transformer of FLUX.1 as a velocity field, and its tokens: patches of 2 x 2 latent elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.sde.guidance import GUIDANCE
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition

PATCH = 2


class Flux1Denoiser:
    """One forward of the transformer."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' FluxTransformer2DModel, which has no types

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text` and, where it reads one, `guidance`."""
        text, scale = conditions["text"], conditions.get(GUIDANCE)
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        assert scale is None or isinstance(scale, ScaleCondition)
        rows, columns = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        dtype = self.transformer.x_embedder.weight.dtype
        v = self.transformer(
            hidden_states=tokens_of(x).to(dtype),
            timestep=sigma,  # the transformer multiplies both by 1000
            guidance=None if scale is None else scale.scale,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            txt_ids=torch.zeros(text.embeds.shape[1], 3, device=x.device),
            img_ids=_places(rows, columns, x.device),
            return_dict=False,
        )[0]
        return latents_of(v.float(), rows, columns)


def tokens_of(x: Tensor) -> Tensor:
    """[B, H W / 4, 4 C] tokens of latents [B, C, H, W], row by row; a token's numbers in the order (C, 2, 2)."""
    return pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)


def latents_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """[B, C, 2 rows, 2 columns] latents of tokens [B, rows columns, 4 C]."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def _places(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows columns, 3] fp32 (0, row, column) of each token."""
    zero = torch.zeros(1, device=device)
    row, column = torch.arange(rows, device=device).float(), torch.arange(columns, device=device).float()
    return torch.cartesian_prod(zero, row, column)
