"""Decodes MP4 and WebM files, within limits of size and duration."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unirl.media.files import ImageLimits, UnreadableMedia

CONTAINERS = {"mp4": "mov", "webm": "matroska"}
"""The only FFmpeg demuxer allowed for each format. Demuxers of playlists, which open other files, are not allowed."""


@dataclass(frozen=True)
class VideoLimits:
    """The limits of a video."""

    frame: ImageLimits
    frames: int
    pixels: int
    """Of all frames together."""
    seconds: float


def decode_video(data: bytes, format: str | None, limits: VideoLimits) -> tuple[bytes, tuple[int, int, int, int]]:
    """Returns the RGB pixels of every frame of an MP4 or WebM file, and their shape [F, H, W, 3].

    Raises UnreadableMedia, and any error of PyAV on damaged data.
    """
    container = CONTAINERS[format or detect_format(data)]
    pixels, count, size = bytearray(), 0, (0, 0)
    for frame in _frames(data, container, limits):
        count += 1
        if count == 1:
            size = (frame.height, frame.width)
            limits.frame.check(frame.width, frame.height)
        if (frame.height, frame.width) != size:
            raise UnreadableMedia(f"frame {count} has another size than the first: {frame.width} x {frame.height}")
        if count > limits.frames or count * size[0] * size[1] > limits.pixels:
            raise UnreadableMedia(f"at most {limits.frames} frames and {limits.pixels} pixels in all are read")
        pixels += _rgb_rows(frame)
    if not count:
        raise UnreadableMedia("a video without frames")
    return bytes(pixels), (count, *size, 3)


def detect_format(data: bytes) -> str:
    """Returns the container format that the first bytes indicate."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    raise UnreadableMedia("neither an MP4 nor a WebM file")


def _frames(data: bytes, container: str, limits: VideoLimits) -> Iterator[Any]:
    """Yields the frames of the only video stream as PyAV objects."""
    try:
        import av
    except ModuleNotFoundError as error:
        raise UnreadableMedia(
            "encoded videos need PyAV: pip install 'unirl-reward-service[video]', or send raw frames"
        ) from error
    with av.open(io.BytesIO(data), mode="r", format=container, options={"protocol_whitelist": ""}) as file:
        if len(file.streams.video) != 1:
            raise UnreadableMedia(f"{len(file.streams.video)} video streams: there must be one")
        stream = file.streams.video[0]
        stream.thread_count = 1
        limits.frame.check(stream.codec_context.width, stream.codec_context.height)
        for frame in file.decode(stream):
            if frame.time is not None and frame.time > limits.seconds:
                raise UnreadableMedia(f"longer than {limits.seconds:g} s")
            yield frame


def _rgb_rows(frame: Any) -> bytes:
    """Returns the pixels of a frame without the padding at the ends of its rows."""
    plane = frame.reformat(format="rgb24").planes[0]
    width, stride = frame.width * 3, plane.line_size
    rows = bytes(plane)
    return rows if stride == width else b"".join(rows[i * stride : i * stride + width] for i in range(frame.height))
