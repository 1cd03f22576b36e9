"""Inputs and decoded samples per modality, and the small previews of them for people to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from unirl.types.batch import Batch, packed, packed_offsets, row, shared

PREVIEW_FRAMES, PREVIEW_SIDE = 33, 256
"""Limits of a video preview: number of frames, and pixels along the longer side. A preview has at most 6.5 MB, as much
as two images of a megapixel. 1 + 32 frames fit video autoencoders, which take one frame and then groups of 4 or 8."""

Metadata = dict[str, Any]
"""The values that a data file gives beside a prompt, as in JSON. A scorer knows which it reads."""

Facts = Mapping[str, float | bool | str]
"""Facts about a sample by name, to be shown in reports."""

RecordedRole = Literal["chosen", "rejected"]
"""Role of a recorded sample: which one of a pair was preferred."""


@dataclass(frozen=True)
class MediaRef:
    """A reference in a data file to an image: a condition of the prompt, or a recorded sample."""

    modality: str
    role: str
    uri: str


def levels_of(pixels: Tensor) -> Tensor:
    """The nearest of the 256 levels of uint8 for pixels in [0, 1]. Levels are returned as they are."""
    return pixels if pixels.dtype is torch.uint8 else pixels.float().mul(255).round_().clamp_(0, 255).to(torch.uint8)


def unit(levels: Tensor) -> Tensor:
    """Pixels in [0, 1], float32, of the levels of uint8: level / 255. Floats are returned as they are."""
    return levels if levels.is_floating_point() else levels.float().div_(255)


@dataclass(kw_only=True, eq=False)
class ImagePreviews(Batch):
    """Images for people to look at, small enough for the driver."""

    pixels: Tensor = row()  # [B, 3, H, W] uint8

    @classmethod
    def of(cls, pixels: Tensor) -> ImagePreviews:
        """Previews of pixels [B, 3, H, W] in [0, 1]."""
        return cls(pixels=levels_of(pixels).cpu())

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`. Images of different sizes are padded to one canvas."""
        canvases = on_one_canvas([part.pixels for part in parts])
        return super().concat([part.replace(pixels=pixels) for part, pixels in zip(parts, canvases, strict=True)])


def on_one_canvas(frames: Sequence[Tensor]) -> list[Tensor]:
    """Frames [N, 3, h, w] uint8, each centred on the smallest white canvas that fits all of them."""
    height, width = (max(part.shape[side] for part in frames) for side in (-2, -1))
    padded = []
    for part in frames:
        top, left = height - part.shape[-2], width - part.shape[-1]
        margins = (left // 2, left - left // 2, top // 2, top - top // 2)
        padded.append(pad(part, margins, value=255) if any(margins) else part)
    return padded


STARTED = "started"
"""Name of the primitive with the beginnings of responses."""


@dataclass(kw_only=True, eq=False)
class StartedResponses(Batch):
    """The tokens of responses that were begun earlier and go on, maybe under other weights. A row may have none."""

    tokens: Tensor = packed()  # [sum L] int64
    logp: Tensor = packed()  # [sum L] under the weights that sampled each token, nats
    versions: Tensor = packed()  # [sum L] int64, optimizer updates behind these weights
    offsets: Tensor = packed_offsets()  # [B + 1]
    pause_after: int = shared()
    """Tokens that a response gets in one go. It then pauses if it has not ended."""

    @staticmethod
    def empty(rows: int, pause_after: int) -> StartedResponses:
        """Responses without any token."""
        none = torch.zeros(0, dtype=torch.int64)
        offsets = torch.zeros(rows + 1, dtype=torch.int64)
        return StartedResponses(
            tokens=none, logp=torch.zeros(0), versions=none, offsets=offsets, pause_after=pause_after
        )


@dataclass(kw_only=True, eq=False)
class Texts(Batch):
    """One text per row."""

    texts: list[str] = row()

    def preview(self) -> Texts:
        """The texts themselves."""
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
    """Images in the 256 levels of uint8, to which decoding rounds, so that every scorer sees the same values."""

    pixels: Tensor = row(heavy=True)  # [B, 3, H, W] uint8

    @classmethod
    def of(cls, pixels: Tensor) -> Images:
        """Images of pixels [B, 3, H, W] in [0, 1]. Rounds to 256 levels."""
        return cls(pixels=levels_of(pixels))

    def preview(self) -> ImagePreviews:
        """The pixels themselves."""
        return ImagePreviews.of(self.pixels)


@dataclass(kw_only=True, eq=False)
class Videos(Batch):
    """Videos with any number of frames, packed along the frames, in the levels of `Images`."""

    frames: Tensor = packed(heavy=True)  # [sum F, 3, H, W] uint8; in [0, 1] in the request of a scorer
    offsets: Tensor = packed_offsets()  # [B + 1]
    fps: float = shared(default=16.0)  # frames per second

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fps < math.inf:
            raise ValueError(f"Videos.fps must be a finite number of frames per second above 0, got {self.fps}")

    @classmethod
    def of(cls, pixels: Tensor, fps: float = 16.0) -> Videos:
        """Videos of pixels [B, 3, F, H, W] in [0, 1], as VAE decoders return them. Rounds to 256 levels."""
        return cls.of_frames(levels_of(pixels).transpose(1, 2), fps)

    @classmethod
    def of_frames(cls, levels: Tensor, fps: float = 16.0) -> Videos:
        """Videos of levels [B, F, 3, H, W] uint8, frame by frame."""
        count, frames = levels.shape[:2]
        return cls(frames=levels.flatten(0, 1), offsets=torch.arange(count + 1) * frames, fps=fps)

    def stacked(self) -> Tensor:
        """Levels [B, 3, F, H, W] uint8, as `of` takes pixels. Raises ValueError if the numbers of frames differ."""
        counts = sorted(set(self.offsets.diff().tolist()))
        if len(counts) != 1:
            raise ValueError(f"videos of {counts or 'no'} frames cannot be stacked: all need the same number of frames")
        return self.frames.reshape(len(self), counts[0], *self.frames.shape[1:]).transpose(1, 2)

    def preview(self) -> VideoPreviews:
        """Every n-th frame of each video: at most PREVIEW_FRAMES of them, at most PREVIEW_SIDE pixels along a side."""
        bounds: Sequence[int] = self.offsets.tolist()
        chosen = [self.frames[a : b : _stride(b - a)] for a, b in pairwise(bounds)]
        height, width = self.frames.shape[-2:]
        no_frames = torch.zeros(0, 3, *_shown_size(height, width), dtype=torch.uint8)
        return VideoPreviews(
            frames=torch.cat([no_frames, *(_shown(frames) for frames in chosen if len(frames))]),
            offsets=torch.tensor([0, *(len(frames) for frames in chosen)]).cumsum(0),
            num_frames=self.offsets.diff(),
            fps=self.fps,
            height=height,
            width=width,
        )


@dataclass(kw_only=True, eq=False)
class VideoPreviews(Batch):
    """Some frames of videos for people to look at, small enough for the driver."""

    frames: Tensor = packed()  # [sum F', 3, h, w] uint8
    offsets: Tensor = packed_offsets()  # [B + 1]
    num_frames: Tensor = row()  # [B] int64 frames of the whole video
    fps: float = shared()  # frames per second of the whole video
    height: int = shared()  # of the whole video, pixels
    width: int = shared()  # of the whole video, pixels

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`. Images of different sizes are padded to one canvas."""
        canvases = on_one_canvas([part.frames for part in parts])
        size = {side: max(vars(part)[side] for part in parts) for side in ("height", "width")}
        both = zip(parts, canvases, strict=True)
        return super().concat([part.replace(frames=frames, **size) for part, frames in both])


def _stride(num_frames: int) -> int:
    """Distance between the frames of a preview. It is constant, so that motion keeps its speed."""
    return max(1, math.ceil((num_frames - 1) / (PREVIEW_FRAMES - 1)))


def _shown(frames: Tensor) -> Tensor:
    """Frames [F, 3, H, W] uint8, scaled down to PREVIEW_SIDE if they are larger."""
    height, width = frames.shape[-2:]
    size = _shown_size(height, width)
    if size != (height, width):
        frames = interpolate(unit(frames), size, mode="bilinear", antialias=True).clamp(0, 1)
    return levels_of(frames).cpu()


def _shown_size(height: int, width: int) -> tuple[int, int]:
    scale = min(1.0, PREVIEW_SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


@dataclass(kw_only=True, eq=False)
class Episodes(Batch):
    """What became of the episodes of each row, for scorers and for people to look at."""

    returns: Tensor = row()  # [B] float32, mean over the episodes of a row of the sum of their rewards
    success: Tensor = row()  # [B] float32, share of the episodes that report it with a success; NaN = none reports it
    lengths: Tensor = row()  # [B] float32, mean number of steps of the environment
    faults: list[str] = row()  # why the environment of a row failed; "" if it did not
    videos: Videos | None = row(optional=True)  # first episodes; no frames in rows that were not drawn

    def preview(self) -> Texts | VideoPreviews:
        """The videos, or a line of numbers for each row if there are none."""
        if self.videos is not None:
            return self.videos.preview()
        numbers = zip(self.returns.tolist(), self.lengths.tolist(), self.success.tolist(), strict=True)
        return Texts(
            texts=[
                f"return {r:.4g}, {n:.4g} steps{'' if math.isnan(s) else f', success {s:.0%}'}" for r, n, s in numbers
            ]
        )


Decoded = Texts | Images | Videos | Episodes
"""The decoded samples of a track."""

Preview = Texts | ImagePreviews | VideoPreviews
"""The same for people to look at. Previews are small, so the driver can hold them."""

Modality = Literal["text", "image", "video", "action"]
