"""The transformer of FLUX.2-klein as a velocity field.

Tokens have places (time, row, column, number): the sample's are (0, row, column, 0), those of the i-th image to be
edited (10 + 10 i, row, column, 0) and those of the text (0, 0, 0, number). Images follow the sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.types.conditions import Conditions, LatentCondition, TextEmbedCondition

IMAGE_GAP = 10
"""Steps of time between the sample and the first image, and between images."""


class KleinDenoiser:
    """One forward of the transformer."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' Flux2Transformer2DModel, which has no types

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text` and, where images are edited, `image`."""
        text, image = conditions["text"], conditions.get("image")
        assert isinstance(text, TextEmbedCondition)
        dtype = self.transformer.x_embedder.weight.dtype
        tokens, places = [_tokens(x)], [_places(x, 0)]
        if image is not None:
            assert isinstance(image, LatentCondition)
            for i, latents in enumerate(image.latents.to(x).unbind(1)):
                tokens.append(_tokens(latents))
                places.append(_places(latents, IMAGE_GAP * (i + 1)))
        v = self.transformer(
            hidden_states=torch.cat(tokens, dim=1).to(dtype),
            timestep=sigma,  # the transformer multiplies it by 1000
            encoder_hidden_states=text.embeds.to(dtype),
            txt_ids=_grid(1, 1, text.embeds.shape[1], device=x.device),
            img_ids=torch.cat(places),
            return_dict=False,
        )[0]
        rows, columns = x.shape[-2:]
        return v[:, : rows * columns].float().transpose(1, 2).unflatten(2, (rows, columns))


def _tokens(x: Tensor) -> Tensor:
    """[B, H W, C] of [B, C, H, W]."""
    return x.flatten(2).transpose(1, 2)


def _places(x: Tensor, time: int) -> Tensor:
    """[H W, 4] of the tokens of x [B, C, H, W]."""
    places = _grid(x.shape[-2], x.shape[-1], 1, device=x.device)
    places[:, 0] = time
    return places


def _grid(rows: int, columns: int, numbers: int, device: torch.device) -> Tensor:
    """[rows columns numbers, 4] int64 places at time 0."""
    axes = [torch.arange(count, device=device) for count in (1, rows, columns, numbers)]
    return torch.cartesian_prod(*axes)
