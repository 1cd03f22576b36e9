"""Conditions: the inputs of a network besides the sample and the noise level."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from unirl.types.batch import Batch, packed, packed_offsets, row


@dataclass(kw_only=True, eq=False)
class TextEmbedCondition(Batch):
    """Text embeddings: per token and, for families that use it, pooled over the prompt."""

    embeds: Tensor = row(heavy=True)  # [B, L, D]
    pooled: Tensor | None = row(heavy=True, optional=True)  # [B, D']
    mask: Tensor | None = row(heavy=True, optional=True)  # [B, L], True at real tokens
    embeds_2: Tensor | None = row(heavy=True, optional=True)  # [B, L2, D2] tokens of a second encoder
    mask_2: Tensor | None = row(heavy=True, optional=True)  # [B, L2], True at real tokens
    lengths: list[tuple[int, int]] | None = row(optional=True)
    """[B] tokens of `embeds` and of `embeds_2` that the network reads. The others are padding, which has no effect.

    All prompts of a request have the same lengths, and keep them, so that a replay computes on the shapes of the
    rollout. None: the network reads all tokens.
    """

    def trimmed(self) -> Self:
        """The same condition without the tokens that no row needs."""
        if self.lengths is None:
            return self
        first, second = (max(lengths) for lengths in zip(*self.lengths, strict=True))
        sizes = {"embeds": first, "mask": first, "embeds_2": second, "mask_2": second}
        cut = {
            name: value[:, :size].contiguous()
            for name, size in sizes.items()
            if (value := vars(self)[name]) is not None
        }
        return self.replace(**cut)


@dataclass(kw_only=True, eq=False)
class LatentCondition(Batch):
    """Latents that the network reads in addition to the sample: of the first frame of a video or of images to edit."""

    latents: Tensor = row(heavy=True)  # [B, ...]; the family defines the other dimensions


@dataclass(kw_only=True, eq=False)
class VisionCondition(Batch):
    """Embeddings of condition images by a vision encoder."""

    embeds: Tensor = row(heavy=True)  # [B, L, D]


@dataclass(kw_only=True, eq=False)
class ScaleCondition(Batch):
    """The guidance scale, as an input of the network."""

    scale: Tensor = row(heavy=True)  # [B] fp32


Span = tuple[int, int]
"""The first token of a range within a prompt, and the token after its last one."""


@dataclass(kw_only=True, eq=False)
class PromptTokens(Batch):
    """Prompts as token ids, including chat template and image placeholders, packed without padding.

    Token t of the response has the position `next_position` + t, in every component.
    """

    tokens: Tensor = packed()  # [sum P] int64
    positions: Tensor = packed()  # [sum P] int64, or [sum P, n] for models whose positions have n components
    next_position: Tensor = row()  # [B] int64
    offsets: Tensor = packed_offsets()  # [B + 1]
    spans: list[tuple[Span, ...]] | None = row(optional=True)
    """[B] ranges of the tokens of a prompt that see each other, such as an image. None: attention is causal."""

    @property
    def lengths(self) -> Tensor:
        """[B] number of tokens per prompt."""
        return self.offsets.diff()

    def costs(self) -> Tensor | None:
        """[B] number of tokens per prompt, including image placeholders."""
        return self.lengths


TextCondition = TextEmbedCondition | PromptTokens
"""A prompt for a denoising model: embeddings of a frozen encoder, or tokens that the trained network embeds itself."""

PatchGrid = tuple[int, int, int]
"""Number of patches of an image along time, height and width."""


class PromptImageInputs(Batch):
    """The images in each prompt, as inputs of the trained network. They keep the order of the text."""

    @abstractmethod
    def identities(self) -> list[Hashable]:
        """One value for each row. Rows with equal values have equal images."""


@dataclass(kw_only=True, eq=False)
class ImagePatches(PromptImageInputs):
    """The patches of the images in each prompt, as inputs of a vision encoder."""

    patches: Tensor = packed(heavy=True)  # [sum N, D]
    grids: list[tuple[PatchGrid, ...]] = row()  # one per image of the row; N = sum of their products
    digests: list[tuple[str, ...]] = row()  # one per image; equal patches have equal ones, so the host compares them
    offsets: Tensor = packed_offsets()  # [B + 1]

    def identities(self) -> list[Hashable]:
        return list(zip(self.grids, self.digests, strict=True))


@dataclass(kw_only=True, eq=False)
class PackedVectors(Batch):
    """Vectors of rows that have different numbers of them."""

    values: Tensor = packed(heavy=True)  # [sum N, D]
    offsets: Tensor = packed_offsets()  # [B + 1]


@dataclass(kw_only=True, eq=False)
class EncodedImages(PromptImageInputs):
    """The images in each prompt, each as latents of a VAE and as features of a vision encoder."""

    latents: PackedVectors = row()  # [sum h w, C], row by row
    features: PackedVectors = row()  # [sum M, D], M of each image
    sizes: list[tuple[tuple[int, int], ...]] = row()  # (h, w) of the latents of each image
    digests: list[tuple[str, ...]] = row()  # one per image; equal images have equal ones

    def identities(self) -> list[Hashable]:
        return list(self.digests)


Conditions = dict[str, Batch]
"""The conditions of a track, by name.

Denoising models use `text`, `negative_text` if guidance is on, and `image` and `vision` for condition images. Language
models use `prompt`, and `images` if the prompts have any.
"""
