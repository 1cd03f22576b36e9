"""What goes in and what comes out, per modality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
class Texts(Batch):
    """One text per row."""

    texts: list[str] = row()


@dataclass(kw_only=True, eq=False)
class MediaRefs(Batch):
    """One reference per row."""

    refs: list[MediaRef] = row()


@dataclass(kw_only=True, eq=False)
class Images(Batch):
    """Pixels in [0, 1], rounded to the 256 levels of uint8 at decode so that every scorer sees the same values."""

    pixels: Tensor = row(heavy=True)  # [B, 3, H, W]


@dataclass(kw_only=True, eq=False)
class Videos(Batch):
    """Videos of any number of frames, laid end to end."""

    frames: Tensor = packed(heavy=True)  # [sum F, 3, H, W]
    offsets: Tensor = packed_offsets()  # [B + 1]


Modality = Literal["text", "image", "video"]
