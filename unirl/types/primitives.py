"""What goes in and what comes out, per modality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from unirl.types.batch import Batch, packed, packed_offsets, row, shared

PREVIEW_FRAMES, PREVIEW_SIDE = 33, 256
"""Frames of a video, and pixels along the longer side of each, that are shown at most: up to 6.5 MB, as two pictures
of a megapixel. One frame and 32 more fit the video autoencoders that take one frame and groups of 4 or 8."""

RecordedRole = Literal["chosen", "rejected"]
"""What was recorded of a picture: which of a pair was preferred."""


@dataclass(frozen=True)
class MediaRef:
    """A reference to a medium in a data file: a condition, or a recorded sample."""

    modality: str
    role: str
    uri: str


@dataclass(kw_only=True, eq=False)
class ImagePreviews(Batch):
    """Samples as people see them: small enough for the driver."""

    pixels: Tensor = row()  # [B, 3, H, W] uint8

    @classmethod
    def of(cls, pixels: Tensor) -> ImagePreviews:
        """From pixels [B, 3, H, W] in [0, 1]."""
        return cls(pixels=(pixels * 255).round().to(torch.uint8).cpu())

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`; where sizes differ, on one canvas."""
        canvases = on_one_canvas([part.pixels for part in parts])
        return super().concat([part.replace(pixels=pixels) for part, pixels in zip(parts, canvases, strict=True)])


def on_one_canvas(frames: Sequence[Tensor]) -> list[Tensor]:
    """Frames [N, 3, h, w] uint8 for people to look at, each in the middle of the smallest white canvas for all."""
    height, width = (max(part.shape[side] for part in frames) for side in (-2, -1))
    found = []
    for part in frames:
        top, left = height - part.shape[-2], width - part.shape[-1]
        margins = (left // 2, left - left // 2, top // 2, top - top // 2)
        found.append(pad(part, margins, value=255) if any(margins) else part)
    return found


@dataclass(kw_only=True, eq=False)
class Texts(Batch):
    """One text per row."""

    texts: list[str] = row()

    def preview(self) -> Texts:
        """For people to read."""
        return self


@dataclass(kw_only=True, eq=False)
class MediaRefs(Batch):
    """One reference per row."""

    refs: list[MediaRef] = row()


@dataclass(kw_only=True, eq=False)
class PromptImages(Batch):
    """The images in the prompt of each row, in the order of its text; () if it has none."""

    per_prompt: list[tuple[MediaRef, ...]] = row()


@dataclass(kw_only=True, eq=False)
class Images(Batch):
    """Pixels in [0, 1], rounded to the 256 levels of uint8 at decode so that every scorer sees the same values."""

    pixels: Tensor = row(heavy=True)  # [B, 3, H, W]

    def preview(self) -> ImagePreviews:
        """For people to look at."""
        return ImagePreviews.of(self.pixels)


@dataclass(kw_only=True, eq=False)
class Videos(Batch):
    """Videos of any number of frames, laid end to end: pixels in [0, 1], rounded to 256 levels as those of `Images`."""

    frames: Tensor = packed(heavy=True)  # [sum F, 3, H, W]
    offsets: Tensor = packed_offsets()  # [B + 1]
    fps: float = shared(default=16.0)  # frames per second

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fps < math.inf:
            raise ValueError(f"Videos.fps must be a number of frames per second above 0, got {self.fps}")

    @classmethod
    def of(cls, pixels: Tensor, fps: float = 16.0) -> Videos:
        """From pixels [B, 3, F, H, W] in [0, 1], as decoders of latents give them; they are rounded here."""
        count, frames = pixels.shape[0], pixels.shape[2]
        levels = pixels.transpose(1, 2).flatten(0, 1).mul(255).round_().div_(255)
        return cls(frames=levels, offsets=torch.arange(count + 1) * frames, fps=fps)

    def stacked(self) -> Tensor:
        """Pixels [B, 3, F, H, W]: the inverse of `of`. Raises ValueError where numbers of frames differ."""
        counts = sorted(set(self.offsets.diff().tolist()))
        if len(counts) != 1:
            raise ValueError(f"videos of {counts or 'no'} frames make no tensor [B, 3, F, H, W]: one number is needed")
        return self.frames.reshape(len(self), counts[0], *self.frames.shape[1:]).transpose(1, 2)

    def preview(self) -> VideoPreviews:
        """Every n-th frame of each video: at most PREVIEW_FRAMES of them, at most PREVIEW_SIDE pixels along a side."""
        bounds: Sequence[int] = self.offsets.tolist()
        chosen = [self.frames[a : b : _stride(b - a)] for a, b in pairwise(bounds)]
        height, width = self.frames.shape[-2:]
        nothing = torch.zeros(0, 3, *_shown_size(height, width), dtype=torch.uint8)
        return VideoPreviews(
            frames=torch.cat([nothing, *(_shown(frames) for frames in chosen)]),
            offsets=torch.tensor([0, *(len(frames) for frames in chosen)]).cumsum(0),
            num_frames=self.offsets.diff(),
            fps=self.fps,
            height=height,
            width=width,
        )


@dataclass(kw_only=True, eq=False)
class VideoPreviews(Batch):
    """Videos as people see them: some of their frames, small enough for the driver."""

    frames: Tensor = packed()  # [sum F', 3, h, w] uint8
    offsets: Tensor = packed_offsets()  # [B + 1]
    num_frames: Tensor = row()  # [B] int64 frames of the video; those shown last as long as all of them
    fps: float = shared()  # of the video
    height: int = shared()  # of the video, pixels
    width: int = shared()

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`; where sizes differ, on one canvas."""
        canvases = on_one_canvas([part.frames for part in parts])
        size = {side: max(vars(part)[side] for part in parts) for side in ("height", "width")}
        both = zip(parts, canvases, strict=True)
        return super().concat([part.replace(frames=frames, **size) for part, frames in both])


def _stride(num_frames: int) -> int:
    """Every how many frames one is shown: one distance throughout, so that even motion stays even."""
    return max(1, math.ceil((num_frames - 1) / (PREVIEW_FRAMES - 1)))


def _shown(frames: Tensor) -> Tensor:
    """Frames [F, 3, h, w] uint8 of frames [F, 3, H, W] in [0, 1], shrunk to PREVIEW_SIDE where they are larger."""
    height, width = frames.shape[-2:]
    size = _shown_size(height, width)
    if size != (height, width):
        frames = interpolate(frames.float(), size, mode="bilinear", antialias=True)
    return (frames * 255).round().clamp(0, 255).to(torch.uint8).cpu()


def _shown_size(height: int, width: int) -> tuple[int, int]:
    scale = min(1.0, PREVIEW_SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


Decoded = Texts | Images | Videos
"""What is decoded from a track."""

Preview = Texts | ImagePreviews | VideoPreviews
"""The same as people see it; light, so that the driver may hold it."""

Modality = Literal["text", "image", "video"]
