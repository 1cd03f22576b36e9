"""The process that decodes untrusted images and videos into raw pixels.

    python -m reward_service.decoder LIMITS SOCKET

It loads neither torch nor transformers. The system limits its memory and ends it when decoding takes too long. It reads
only files below the media roots. It answers with pixels or with an error message.
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
"""The only formats that are read. They are imported here, so that the first image does not take longer than others."""
ORIENTATION = 0x0112
"""The EXIF tag for rotation and mirroring."""
VIDEO_TIME = 10
"""A video may take this many times as long as an image."""
CONTAINERS = {"mp4": "mov", "webm": "matroska"}
"""The only FFmpeg demuxer allowed for each format. Demuxers of playlists, which open other files, are not allowed."""


class DecodeLimits(Struct):
    """The limits of an image or video."""

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
    """The image or video cannot be read; the message gives the reason."""


def decode(message: DecodeMedia, limits: DecodeLimits) -> MediaPayload:
    """Returns the requested raw pixels. Raises UnreadableMedia and any error of a library on damaged data."""
    format, data = _encoded(message, limits)
    if len(data) > limits.file_bytes:
        raise UnreadableMedia(f"the file has {len(data)} bytes: at most {limits.file_bytes} are read")
    return decode_video(data, format, limits) if message.modality == "video" else decode_image(data, format, limits)


def _encoded(message: DecodeMedia, limits: DecodeLimits) -> tuple[str | None, bytes]:
    """Returns the declared format, if any, and the bytes of the file."""
    if message.medium is not None:
        return message.medium.format, message.medium.data
    if message.base64 is not None:
        try:
            return None, base64.b64decode(message.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnreadableMedia(f"not base64: {error}") from error
    return None, read_below(message.path or "", limits)


def decode_image(data: bytes, format: str | None, limits: DecodeLimits) -> MediaPayload:
    """Returns the pixels [H, W, 3] of a PNG, JPEG or WebP file, which must have the declared format if there is one."""
    formats = [format.upper()] if format else list(READERS)
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError as error:
        raise UnreadableMedia(f"it does not begin as a {' or '.join(formats)} file") from error
    except Image.DecompressionBombError as error:
        raise UnreadableMedia(f"too many pixels: {error}") from error
    with image:
        _check_size(image.width, image.height, limits)
        frames = getattr(image, "n_frames", 1)
        if frames != 1:
            raise UnreadableMedia(f"an animation of {frames} frames: send one image")
        if image.getexif().get(ORIENTATION, 1) != 1:
            raise UnreadableMedia("its EXIF orientation rotates the image: save it upright")
        return _raw(_rgb(image))


def _check_size(width: int, height: int, limits: DecodeLimits) -> None:
    if max(width, height) > limits.side or width * height > limits.pixels:
        raise UnreadableMedia(
            f"{width} x {height} pixels: at most {limits.pixels}, and {limits.side} along a side, are read"
        )


def _rgb(image: Image.Image) -> Image.Image:
    """Returns the image in RGB. Raises UnreadableMedia when the conversion is not lossless."""
    if image.mode in PLAIN_MODES and "transparency" not in image.info:
        return image.convert("RGB")
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    raise UnreadableMedia(f"mode {image.mode} has transparency or other than 8-bit colors: save the image as RGB")


def _raw(image: Image.Image) -> MediaPayload:
    return MediaPayload(format="raw", data=image.tobytes(), shape=(image.height, image.width, 3))


def decode_video(data: bytes, format: str | None, limits: DecodeLimits) -> MediaPayload:
    """Returns the pixels [F, H, W, 3] of every frame of an MP4 or WebM file."""
    container = CONTAINERS[format or detect_format(data)]
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


def detect_format(data: bytes) -> str:
    """Returns the container format that the first bytes indicate."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    raise UnreadableMedia("neither an MP4 nor a WebM file")


def _frames(data: bytes, container: str, limits: DecodeLimits) -> Iterator[Any]:
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
        _check_size(stream.codec_context.width, stream.codec_context.height, limits)
        for frame in file.decode(stream):
            if frame.time is not None and frame.time > limits.video_s:
                raise UnreadableMedia(f"longer than {limits.video_s:g} s")
            yield frame


def _rgb_rows(frame: Any) -> bytes:
    """Returns the pixels of a frame without the padding at the ends of its rows."""
    plane = frame.reformat(format="rgb24").planes[0]
    width, stride = frame.width * 3, plane.line_size
    rows = bytes(plane)
    return rows if stride == width else b"".join(rows[i * stride : i * stride + width] for i in range(frame.height))


def read_below(path: str, limits: DecodeLimits) -> bytes:
    """Returns the file at a path below one of the media roots. All refusals have one text, which reveals no path."""
    refused = UnreadableMedia("video_path names no file below the service's media roots that may be read")
    if "\0" in path:
        raise refused
    for root in limits.media_roots:
        base = os.path.realpath(root)
        real = os.path.realpath(os.path.join(base, path))
        if os.path.commonpath([base, real]) != base:
            continue
        with suppress(OSError):
            # Opening a FIFO or a device must not block, and the resolved path must not be a link.
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return file.read(limits.file_bytes + 1)
    raise refused


def answer(message: DecodeMedia, limits: DecodeLimits) -> DecodedMedia:
    """Returns the pixels or an error. The process ends by SIGPROF when decoding takes more CPU time than allowed.

    The limit is CPU time and not wall-clock time, so that a busy machine does not refuse valid media.
    """
    signal.setitimer(signal.ITIMER_PROF, limits.decode_s * (VIDEO_TIME if message.modality == "video" else 1))
    try:
        return DecodedMedia(medium=decode(message, limits))
    except UnreadableMedia as error:
        return DecodedMedia(error=str(error))
    except MemoryError:
        return DecodedMedia(error=f"it needs more than the {limits.address_space} bytes that a decoder may use")
    except Exception as error:  # decoders of images and videos raise almost anything on damaged data
        return DecodedMedia(error=f"cannot be decoded ({type(error).__name__}: {str(error)[:200]})")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    limits = msgspec.json.decode(sys.argv[1], type=DecodeLimits)
    channel = Channel(int(sys.argv[2]))
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (limits.address_space, limits.address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Pillow warns about large images. Their size is checked here before any pixel is read.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    with suppress(PeerGone):
        while True:
            message = channel.receive()
            assert isinstance(message, DecodeMedia)
            channel.send(answer(message, limits))


if __name__ == "__main__":
    main()
