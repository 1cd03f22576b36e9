"""The tokens of images and their prompts as one input of BAGEL's network, and the attention among them.

    tokens of the understanding expert   texts end to end | start and end of each image | padding
    tokens of the generation expert      latent tokens of each image

    text of a row         sees the earlier text of its row, and itself              positions 0, 1, ..., P - 1
    image of a row        its start, its latents and its end see each other         position P of all tokens
                          and the whole text of the row

A text therefore does not depend on the image. Nothing is kept between the forwards of a trajectory, so that sampling
and replay run the same forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.chunks import round_up
from unirl.models.language.attention import (
    ROW_PAD_MULTIPLE,
    AttentionFn,
    AttentionLayer,
    PackedAttention,
    softmax_attention,
)
from unirl.types.conditions import PromptTokens
from unirl.types.device import to_device
from unirl.types.rows import rows_by_key

MARKS = 2
"""Tokens of the understanding expert in an image: its start and its end."""


@dataclass(frozen=True)
class ImageInputs:
    """The input of one forward for images."""

    latents: Tensor  # [B, C, H, W]
    sigma: Tensor  # [B]
    tokens: Tensor  # [N] int64, those of the understanding expert
    positions: Tensor  # [N + B L] int64, L latent tokens of each image
    attention_fn: AttentionFn


def image_inputs(
    latents: Tensor, sigma: Tensor, prompts: PromptTokens, marks: tuple[int, int], patch_size: int, multiple: int
) -> ImageInputs:
    """The input for noisy latents [B, C, H, W] at noise levels sigma [B].

    Args:
        marks: the tokens for the start and the end of an image.
        multiple: the tokens of the understanding expert are padded to a multiple of this.
    """
    batch, lengths, device = len(latents), prompts.lengths.tolist(), latents.device
    num_latents = latents.shape[-2] * latents.shape[-1] // patch_size**2
    num_real = sum(lengths) + MARKS * batch
    padding = torch.zeros(round_up(num_real, multiple) - num_real, dtype=torch.int64, device=device)
    image_marks = to_device(torch.tensor(marks * batch), device)
    after = prompts.next_position
    places = (prompts.positions, after.repeat_interleave(MARKS), padding, after.repeat_interleave(num_latents))
    return ImageInputs(
        latents=latents,
        sigma=sigma,
        tokens=torch.cat([prompts.tokens, image_marks, padding]),
        positions=torch.cat(places),
        attention_fn=ImageAttention(lengths, num_latents, len(padding), device),
    )


@dataclass(frozen=True)
class RowGroup:
    """Rows whose texts are padded to the same length. A row's bits then depend on its own length alone."""

    rows: Tensor  # [b] int64
    text: Tensor  # [b, W] int64, the packed text token at each place
    mask: Tensor | None  # [b, 1, 1, W + image tokens], True at real tokens. None without text


class ImageAttention:
    """The attention of one forward, over the tokens of both experts one after the other."""

    def __init__(self, lengths: Sequence[int], num_latents: int, num_padding: int, device: torch.device) -> None:
        """
        Args:
            lengths: text tokens of each row; 0 without text.
        """
        # Everything is computed here, before the layers run, because their compiled forms only read it.
        self.batch = len(lengths)
        self.sizes = [sum(lengths), MARKS * self.batch, num_padding, num_latents * self.batch]
        self.text = PackedAttention(lengths, device) if sum(lengths) else None
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.groups: list[RowGroup] = []
        order: list[int] = []
        for width, rows in rows_by_key(round_up(length, ROW_PAD_MULTIPLE) for length in lengths).items():
            places = torch.arange(width)
            is_real = places < torch.tensor(lengths)[rows, None]
            tokens = torch.where(is_real, starts[rows, None] + places, starts[rows, None])
            seen = torch.cat([is_real, torch.ones(len(rows), MARKS + num_latents, dtype=torch.bool)], dim=1)
            mask = to_device(seen[:, None, None], device) if width else None
            self.groups.append(RowGroup(to_device(torch.tensor(rows), device), to_device(tokens, device), mask))
            order += rows
        self.place_of_row = to_device(torch.tensor(order).argsort(), device)

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        queries, keys, values = (tensor.split(self.sizes) for tensor in (query, key, value))
        text = queries[0]
        if self.text is not None:
            text = self.text(layer, text, keys[0], values[0], scale)
        images = torch.cat([self.attended(group, queries, keys, values, scale) for group in self.groups])
        images = images.index_select(0, self.place_of_row)
        marks, latents = images[:, :MARKS].flatten(0, 1), images[:, MARKS:].flatten(0, 1)
        return torch.cat([text, marks, torch.zeros_like(queries[2]), latents])

    def attended(
        self, group: RowGroup, query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor], scale: float
    ) -> Tensor:
        """[b, image tokens, H, d] of the images of a group, from the split queries, keys and values of all tokens."""
        q = self.images_of(query, group.rows)
        k, v = (torch.cat([part[0][group.text], self.images_of(part, group.rows)], dim=1) for part in (key, value))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return softmax_attention(q, k, v, scale, group.mask).transpose(1, 2)

    def images_of(self, parts: Sequence[Tensor], rows: Tensor) -> Tensor:
        """[b, image tokens, ., d] of the images of some rows: start and end, then the latents."""
        marks, latents = (parts[i].unflatten(0, (self.batch, -1)) for i in (1, 3))
        return torch.cat([marks, latents], dim=1)[rows]
