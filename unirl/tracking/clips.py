"""Files of moving pictures: animated WebP always, MP4 where PyAV is installed, GIF for services that take no other."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

PLAYED_SIDE = 256
"""Clips whose sides are all shorter are enlarged to about this many pixels for MP4 and GIF, by repeating pixels."""
ENCODER = "libx264"
QUALITY = {"crf": "16", "preset": "veryfast"}
"""Of MP4: a difference that eyes rarely see."""


def write_webp(path: Path, frames: np.ndarray, frame_ms: float, lossless: bool) -> None:
    """Frames [F, H, W, 3] uint8 that are shown for `frame_ms` each, over and over."""
    first, *others = [Image.fromarray(frame) for frame in frames]
    lasting = [max(b - a, 1) for a, b in pairwise(_starts(len(frames) + 1, frame_ms))]
    first.save(
        path, save_all=True, append_images=others, duration=lasting, loop=0, lossless=lossless, quality=90, method=0
    )


def read_webp(path: Path, num_frames: int, frame_ms: float) -> np.ndarray:
    """[F, H, W, 3] uint8, the inverse of `write_webp`: a file holds frames that are equal and adjacent only once."""
    moments = _moments(path)
    shown = np.searchsorted([moment.start_ms for moment in moments], _starts(num_frames, frame_ms), side="right") - 1
    return np.stack([moments[number].picture for number in shown])


@dataclass(frozen=True)
class Moment:
    """One picture of a file, and when it is shown."""

    picture: np.ndarray  # [H, W, 3] uint8
    start_ms: int
    lasting_ms: int


def _moments(path: Path) -> list[Moment]:
    moments = []
    with Image.open(path, formats=["WEBP"]) as file:
        for frame in ImageSequence.Iterator(file):
            picture = np.asarray(frame.convert("RGB"))  # reading the pixels is what fills in the times
            moments.append(Moment(picture, frame.info.get("timestamp", 0), frame.info.get("duration", 0)))
    return moments


def _starts(count: int, frame_ms: float) -> list[int]:
    """When each frame begins, in whole milliseconds, at least one apart."""
    return [round(number * max(frame_ms, 1.0)) for number in range(count)]


def can_write_mp4() -> bool:
    """Whether PyAV is installed, with an encoder of H.264."""
    if find_spec("av") is None:
        return False
    try:
        import av
    except ImportError:
        return False  # installed for another system
    return ENCODER in av.codecs_available


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """Frames [F, H, W, 3] uint8 as H.264 that any player shows; an odd side loses nothing and gains a line."""
    import av

    pictures = [_even(enlarged(frame, PLAYED_SIDE)) for frame in frames]
    # With its index at the front, a browser plays the file while it loads.
    with av.open(str(path), mode="w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(ENCODER, rate=Fraction(fps).limit_denominator(1000), options=QUALITY)
        stream.height, stream.width, stream.pix_fmt = *pictures[0].shape[:2], "yuv420p"
        stream.thread_count = 1
        for frame in [*(av.VideoFrame.from_ndarray(picture, format="rgb24") for picture in pictures), None]:
            container.mux(stream.encode(frame))


def gif_of(webp: Path) -> bytes:
    """The moving picture of a file as GIF, 256 colours a frame."""
    moments = _moments(webp)
    first, *others = [Image.fromarray(enlarged(moment.picture, PLAYED_SIDE)) for moment in moments]
    lasting = [moment.lasting_ms for moment in moments]
    file = io.BytesIO()
    first.save(file, format="GIF", save_all=True, append_images=others, duration=lasting, loop=0)
    return file.getvalue()


def enlarged(picture: np.ndarray, side: int) -> np.ndarray:
    """The picture [H, W, 3], every pixel repeated as often as it stays within `side`."""
    times = max(1, side // max(picture.shape[:2]))
    return np.repeat(np.repeat(picture, times, axis=0), times, axis=1)


def _even(picture: np.ndarray) -> np.ndarray:
    """H.264 takes even sides: the last line again where one is odd."""
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
