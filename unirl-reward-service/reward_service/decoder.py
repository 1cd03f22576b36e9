"""The process that turns pictures and videos of strangers into raw pixels.

    python -m reward_service.decoder LIMITS SOCKET

It loads neither torch nor transformers, the system caps its memory and ends it when a medium takes too much of its
time, and it reads no file but those below the media roots. It answers with pixels or with a problem.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import resource
import signal
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct
from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

from reward_service.frames import Channel, DecodedMedia, DecodeMedia, PeerGone, end_with_parent
from unirl.reward.client.wire import MediaPayload

PLAIN_MODES = ("RGB", "L", "P", "1")
READERS = {"PNG": PngImagePlugin, "JPEG": JpegImagePlugin, "WEBP": WebPImagePlugin}
"""The only formats that are read; loaded now, so that the first picture takes no longer than the next."""
ORIENTATION = 0x0112
"""The EXIF tag that asks a viewer to turn the picture."""
VIDEO_TIME = 10
"""A video may take this many times as long as a picture."""
CONTAINERS = {"mp4": "mov", "webm": "matroska"}
"""Format to the one demuxer of FFmpeg that may read it: playlists and lists of files, which open others, are none."""


class DecodeLimits(Struct):
    """What a medium may be."""

    side: int
    pixels: int
    frames: int
    video_pixels: int
    video_s: float
    decode_s: float
    file_bytes: int
    address_space: int
    media_roots: list[str]


class UnreadableMedia(ValueError):
    """The medium is not what it should be; the message says why."""


def decode(asked: DecodeMedia, limits: DecodeLimits) -> MediaPayload:
    """The raw pixels that were asked for. Raises UnreadableMedia, and whatever a library raises on damaged data."""
    format, data = _encoded(asked, limits)
    if len(data) > limits.file_bytes:
        raise UnreadableMedia(f"a file of {len(data)} bytes: at most {limits.file_bytes} are read")
    return decode_video(data, format, limits) if asked.modality == "video" else decode_image(data, format, limits)


def _encoded(asked: DecodeMedia, limits: DecodeLimits) -> tuple[str | None, bytes]:
    """The declared format, if any, and the bytes of the file."""
    if asked.medium is not None:
        return asked.medium.format, asked.medium.data
    if asked.base64 is not None:
        try:
            return None, base64.b64decode(asked.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnreadableMedia(f"no base64: {error}") from error
    return None, read_below(asked.path or "", limits)


def decode_image(data: bytes, format: str | None, limits: DecodeLimits) -> MediaPayload:
    """[H, W, 3] of a PNG, JPEG or WebP file; of the declared format if there is one."""
    formats = [format.upper()] if format else list(READERS)
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError as error:
        raise UnreadableMedia(f"it does not begin as a {' or '.join(formats)} file does") from error
    except Image.DecompressionBombError as error:
        raise UnreadableMedia(f"too many pixels: {error}") from error
    with image:
        _check_size(image.width, image.height, limits)
        frames = getattr(image, "n_frames", 1)
        if frames != 1:
            raise UnreadableMedia(f"an animation of {frames} frames: send one picture")
        if image.getexif().get(ORIENTATION, 1) != 1:
            raise UnreadableMedia("its EXIF orientation turns the picture: save it upright")
        return _raw(_rgb(image))


def _check_size(width: int, height: int, limits: DecodeLimits) -> None:
    if max(width, height) > limits.side or width * height > limits.pixels:
        raise UnreadableMedia(
            f"{width} x {height} pixels: at most {limits.pixels}, and {limits.side} along a side, are read"
        )


def _rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, if that loses nothing."""
    if image.mode in PLAIN_MODES and "transparency" not in image.info:
        return image.convert("RGB")
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    raise UnreadableMedia(f"mode {image.mode} with transparency or other than 8-bit colors: save the picture as RGB")


def _raw(image: Image.Image) -> MediaPayload:
    return MediaPayload(format="raw", data=image.tobytes(), shape=(image.height, image.width, 3))


def decode_video(data: bytes, format: str | None, limits: DecodeLimits) -> MediaPayload:
    """[F, H, W, 3] of every frame of an MP4 or WebM file."""
    container = CONTAINERS[format or sniffed(data)]
    pixels, count, size = bytearray(), 0, (0, 0)
    for frame in _frames(data, container, limits):
        count += 1
        if count == 1:
            size = (frame.height, frame.width)
            _check_size(frame.width, frame.height, limits)
        if (frame.height, frame.width) != size:
            raise UnreadableMedia(f"frame {count} has another size than the first: {frame.width} x {frame.height}")
        if count > limits.frames or count * size[0] * size[1] > limits.video_pixels:
            raise UnreadableMedia(f"at most {limits.frames} frames and {limits.video_pixels} pixels in all are read")
        pixels += _rgb_rows(frame)
    if not count:
        raise UnreadableMedia("a video without frames")
    return MediaPayload(format="raw", data=bytes(pixels), shape=(count, *size, 3))


def sniffed(data: bytes) -> str:
    """Which container the first bytes say it is."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    raise UnreadableMedia("neither an MP4 nor a WebM file")


def _frames(data: bytes, container: str, limits: DecodeLimits) -> Iterator[Any]:
    """The frames of the one video stream, as PyAV gives them."""
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
        _check_size(stream.codec_context.width, stream.codec_context.height, limits)
        for frame in file.decode(stream):
            if frame.time is not None and frame.time > limits.video_s:
                raise UnreadableMedia(f"longer than {limits.video_s:g} s")
            yield frame


def _rgb_rows(frame: Any) -> bytes:
    """The pixels of a frame without the padding at the ends of its rows."""
    plane = frame.reformat(format="rgb24").planes[0]
    width, stride = frame.width * 3, plane.line_size
    rows = bytes(plane)
    return rows if stride == width else b"".join(rows[i * stride : i * stride + width] for i in range(frame.height))


def read_below(path: str, limits: DecodeLimits) -> bytes:
    """The file at a path below one of the media roots; every refusal reads alike, so that none tells what exists."""
    refused = UnreadableMedia("video_path names no file below the service's media roots that may be read")
    if "\0" in path:
        raise refused
    for root in limits.media_roots:
        base = os.path.realpath(root)
        real = os.path.realpath(os.path.join(base, path))
        if os.path.commonpath([base, real]) != base:
            continue
        with suppress(OSError):
            # A fifo or a device must not block, and nothing may be a link by now.
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return file.read(limits.file_bytes + 1)
    raise refused


def answer(asked: DecodeMedia, limits: DecodeLimits) -> DecodedMedia:
    """Pixels, or the problem. Ends the process (SIGPROF) when it takes more CPU time than a medium may.

    CPU time, so that no medium is refused because the machine is busy.
    """
    signal.setitimer(signal.ITIMER_PROF, limits.decode_s * (VIDEO_TIME if asked.modality == "video" else 1))
    try:
        return DecodedMedia(medium=decode(asked, limits))
    except UnreadableMedia as refused:
        return DecodedMedia(problem=str(refused))
    except MemoryError:
        return DecodedMedia(problem=f"it needs more than the {limits.address_space} bytes that a decoder may use")
    except Exception as error:  # decoders of images and videos raise almost anything on damaged data
        return DecodedMedia(problem=f"cannot be decoded ({type(error).__name__}: {str(error)[:200]})")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    limits = msgspec.json.decode(sys.argv[1], type=DecodeLimits)
    channel = Channel(int(sys.argv[2]))
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (limits.address_space, limits.address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Pillow warns of large pictures; their size is checked here before any pixel is read.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    with suppress(PeerGone):
        while True:
            asked = channel.receive()
            assert isinstance(asked, DecodeMedia)
            channel.send(answer(asked, limits))


if __name__ == "__main__":
    main()
