"""What a network is conditioned on, as it is fed to the network."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.types.batch import Batch, packed, packed_offsets, row


@dataclass(kw_only=True, eq=False)
class TextEmbedCondition(Batch):
    """Text embeddings: per token, and pooled where the family uses it."""

    embeds: Tensor = row(heavy=True)  # [B, L, D]
    pooled: Tensor | None = row(heavy=True, optional=True)  # [B, D']
    mask: Tensor | None = row(heavy=True, optional=True)  # [B, L], True at real tokens
    embeds_2: Tensor | None = row(heavy=True, optional=True)  # [B, L2, D2] tokens of a second encoder
    mask_2: Tensor | None = row(heavy=True, optional=True)  # [B, L2], True at real tokens


@dataclass(kw_only=True, eq=False)
class LatentCondition(Batch):
    """Latents that the network reads beside the sample: of a video's first frame, or of pictures to be edited."""

    latents: Tensor = row(heavy=True)  # [B, ...], the family says which dimensions


@dataclass(kw_only=True, eq=False)
class VisionCondition(Batch):
    """What a vision tower says of condition pictures."""

    embeds: Tensor = row(heavy=True)  # [B, L, D]


@dataclass(kw_only=True, eq=False)
class ScaleCondition(Batch):
    """A guidance scale that the network reads."""

    scale: Tensor = row(heavy=True)  # [B] fp32


@dataclass(kw_only=True, eq=False)
class PromptTokens(Batch):
    """Prompts as a language model reads them, template and image placeholders included, packed without padding.

    Token t of the response stands at position next_position + t, in every component.
    """

    tokens: Tensor = packed()  # [sum P] int64
    positions: Tensor = packed()  # [sum P] int64, or [sum P, 3] (time, row, column) where images have places
    next_position: Tensor = row()  # [B] int64
    offsets: Tensor = packed_offsets()  # [B + 1]

    @property
    def lengths(self) -> Tensor:
        """[B] number of tokens per prompt."""
        return self.offsets.diff()

    def costs(self) -> Tensor | None:
        """[B] its tokens, those that stand for images included."""
        return self.lengths


Grid = tuple[int, int, int]
"""Patches of an image: frames, rows, columns."""


@dataclass(kw_only=True, eq=False)
class ImagePatches(Batch):
    """The images of prompts as a vision tower reads them: all patches of a row's images, in the order of the text."""

    patches: Tensor = packed(heavy=True)  # [sum N, D]
    grids: list[tuple[Grid, ...]] = row()  # of each image of a row; N = the sum of their products
    offsets: Tensor = packed_offsets()  # [B + 1]


Conditions = dict[str, Batch]
"""The conditions of a track by name.

Denoising: `text`, what condition pictures give (`image`, `vision`), and `negative_text` when guidance needs it. Text:
`prompt`, and `images` when there are any.
"""
