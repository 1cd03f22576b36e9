"""What goes in and what comes out, per modality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.types.batch import Batch, packed, packed_offsets, row

RecordedRole = Literal["chosen", "rejected"]
"""What was recorded of a picture: which of a pair was preferred."""


@dataclass(frozen=True)
class MediaRef:
    """A reference to a medium in a data file: a condition, or a recorded sample."""

    modality: str
    role: str
    uri: str


@dataclass(kw_only=True, eq=False)
class Pictures(Batch):
    """Samples as people see them: small enough for the driver."""

    pixels: Tensor = row()  # [B, 3, H, W] uint8

    @classmethod
    def of(cls, pixels: Tensor) -> Pictures:
        """From pixels [B, 3, H, W] in [0, 1]."""
        return cls(pixels=(pixels * 255).round().to(torch.uint8).cpu())


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
    """The pictures that each row's prompt is about, in the order of its text; () = none."""

    refs: list[tuple[MediaRef, ...]] = row()


@dataclass(kw_only=True, eq=False)
class Images(Batch):
    """Pixels in [0, 1], rounded to the 256 levels of uint8 at decode so that every scorer sees the same values."""

    pixels: Tensor = row(heavy=True)  # [B, 3, H, W]

    def preview(self) -> Pictures:
        """For people to look at."""
        return Pictures.of(self.pixels)


@dataclass(kw_only=True, eq=False)
class Videos(Batch):
    """Videos of any number of frames, laid end to end."""

    frames: Tensor = packed(heavy=True)  # [sum F, 3, H, W]
    offsets: Tensor = packed_offsets()  # [B + 1]

    def preview(self) -> Pictures:
        """The middle frame of each, for people to look at."""
        return Pictures.of(self.frames[(self.offsets[:-1] + self.offsets[1:]) // 2])


Medium = Texts | Images | Videos
"""What is decoded from a track."""

Preview = Texts | Pictures
"""The same as people see it; light, so that the driver may hold it."""

Modality = Literal["text", "image", "video"]
