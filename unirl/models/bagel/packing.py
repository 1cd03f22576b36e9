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
from unirl.models.language.attention import AttentionFn, AttentionLayer, PackedAttention
from unirl.models.unified.attention import ImageAttention
from unirl.types.conditions import PromptTokens
from unirl.types.device import to_device

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
        attention_fn=BagelAttention(lengths, num_latents, len(padding), device),
    )


class BagelAttention:
    """The attention of one forward, over the tokens of both experts one after the other."""

    def __init__(self, lengths: Sequence[int], num_latents: int, num_padding: int, device: torch.device) -> None:
        """
        Args:
            lengths: text tokens of each row; 0 without text.
        """
        self.batch = len(lengths)
        self.sizes = [sum(lengths), MARKS * self.batch, num_padding, num_latents * self.batch]
        self.text = PackedAttention(lengths, device) if sum(lengths) else None
        self.images = ImageAttention(lengths, MARKS + num_latents, device)

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        queries, keys, values = (tensor.split(self.sizes) for tensor in (query, key, value))
        text = queries[0]
        if self.text is not None:
            text = self.text(layer, text, keys[0], values[0], scale)
        q, k, v = (self.images_in(parts) for parts in (queries, keys, values))
        images = self.images(q, k, v, keys[0], values[0], scale)
        marks, latents = images[:, :MARKS].flatten(0, 1), images[:, MARKS:].flatten(0, 1)
        return torch.cat([text, marks, torch.zeros_like(queries[2]), latents])

    def images_in(self, parts: Sequence[Tensor]) -> Tensor:
        """[B, image tokens, ., d] of each image: start and end, then the latents."""
        marks, latents = (parts[i].unflatten(0, (self.batch, -1)) for i in (1, 3))
        return torch.cat([marks, latents], dim=1)
