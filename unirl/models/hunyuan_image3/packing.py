"""Prompts and noisy images as one input of HunyuanImage-3's network, and the attention among their tokens.

    prefix of a row   prompt, <boi>, size, ratio, <timestep>   positions 0, 1, ..., P - 1 (row = column)
    image of a row    L latent tokens                          rows and columns of a grid around P + L / 2

A token of a prefix sees the earlier tokens of its row, itself, and the whole of its span, which is an image in the
prompt. A token of an image sees the prefix of its row and the whole image. The prefixes come first, end to end and
padded, and then the images. The tokens after an image are left out, since no token of the image sees them. Nothing is
kept between the forwards of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.chunks import round_up
from unirl.models.language.attention import AttentionFn, AttentionLayer, PackedAttention
from unirl.models.unified.attention import ImageAttention
from unirl.types.conditions import PromptImageInputs, PromptTokens, Span
from unirl.types.device import CPU, to_device

HEADER = 4
"""Tokens between a prompt and the latents of its image: <boi>, size, ratio and <timestep>."""


@dataclass(frozen=True)
class PrefixedImages:
    """The input of one forward for images."""

    latents: Tensor  # [B, C, H, W]
    timesteps: Tensor  # [B] fp32
    tokens: Tensor  # [N] int64, those of the prefixes
    timestep_index: Tensor  # [B] the place of each <timestep> among the tokens
    positions: Tensor  # [N + B L, 2] int64, row and column
    attention_fn: AttentionFn
    images: PromptImageInputs | None = None
    """The images in the prompts."""


def image_inputs(
    latents: Tensor,
    timesteps: Tensor,
    prompts: PromptTokens,
    header: Sequence[int],
    multiple: int,
    images: PromptImageInputs | None = None,
) -> PrefixedImages:
    """The input for noisy latents [B, C, H, W] at timesteps [B]. Each latent of the image is a token.

    Args:
        header: the tokens <boi>, size, ratio and <timestep>.
        multiple: the tokens of the prefixes are padded to a multiple of this.
        images: the images in the prompts.
    """
    device, (rows, columns) = latents.device, latents.shape[-2:]
    own_lengths = prompts.lengths.tolist()
    lengths = [length + HEADER for length in own_lengths]
    marks = to_device(torch.tensor(list(header)), device)
    tokens = [part for row in prompts.tokens.split(own_lengths) for part in (row, marks)]
    padding = round_up(sum(lengths), multiple) - sum(lengths)
    places = prompts.positions if prompts.positions.dim() == 2 else prompts.positions[:, None].expand(-1, 2)
    after = to_device(torch.arange(HEADER), device)[:, None] + prompts.next_position.to(device)[:, None, None]
    prefixes = [part for pair in zip(places.split(own_lengths), after.expand(-1, -1, 2), strict=True) for part in pair]
    grids = [image_positions(length, rows, columns) for length in lengths]
    ends = torch.tensor(lengths).cumsum(0) - 1
    return PrefixedImages(
        latents=latents,
        timesteps=timesteps,
        tokens=torch.cat([*tokens, marks.new_zeros(padding)]),
        timestep_index=to_device(ends, device),
        positions=torch.cat([*prefixes, places.new_zeros(padding, 2), to_device(torch.cat(grids), device)]),
        attention_fn=PrefixedAttention(lengths, padding, rows * columns, device, prompts.spans),
        images=images,
    )


def image_positions(start: int, rows: int, columns: int) -> Tensor:
    """[rows * columns, 2] row and column of each latent. The grid is centred in the places `start`, `start` + 1, ...

    The latents take as many places as there are, so that text after the image would go on at `start` + rows * columns.
    """
    count = rows * columns
    row = start + (count - rows) // 2 + torch.arange(rows)
    column = start + (count - columns) // 2 + torch.arange(columns)
    return torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).flatten(0, 1)


class PrefixedAttention:
    """The attention of one forward, over the prefixes and then the images."""

    def __init__(
        self,
        lengths: Sequence[int],
        padding: int,
        num_latents: int,
        device: torch.device = CPU,
        spans: Sequence[Sequence[Span]] | None = None,
    ) -> None:
        """
        Args:
            lengths: tokens of the prefix of each row.
            spans: the ranges of each prefix whose tokens see each other.
        """
        self.batch = len(lengths)
        self.sizes = [sum(lengths) + padding, num_latents * self.batch]
        self.prefixes = PackedAttention([*lengths, padding], device, spans and [*spans, ()])
        self.images = ImageAttention(lengths, num_latents, device)

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        (text, latents), keys, values = (tensor.split(self.sizes) for tensor in (query, key, value))
        text = self.prefixes(layer, text, keys[0], values[0], scale)
        q, k, v = (t.unflatten(0, (self.batch, -1)) for t in (latents, keys[1], values[1]))
        images = self.images(q, k, v, keys[0], values[0], scale)
        return torch.cat([text, images.flatten(0, 1)])
