"""The process that decodes untrusted images and videos into raw pixels.

    python -m reward_service.decoder LIMITS SOCKET

It loads neither torch nor transformers. The system limits its memory and ends it when decoding takes too long. It reads
only files below the media roots. It answers with pixels or with an error message. `unirl.media` decodes.
"""

from __future__ import annotations

import base64
import binascii
import signal
import sys
from contextlib import suppress

import msgspec
from msgspec import Struct

from reward_service.frames import Channel, DecodedMedia, DecodeMedia, PeerGone, end_with_parent
from unirl.media.files import ImageLimits, UnreadableMedia, check_bytes, read_below
from unirl.media.images import READERS, decode_exact, open_header
from unirl.media.process import limit_process
from unirl.media.videos import VideoLimits, decode_video
from unirl.reward.client.wire import MediaPayload

VIDEO_TIME = 10
"""A video may take this many times as long as an image."""


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

    @property
    def of_image(self) -> ImageLimits:
        return ImageLimits(pixels=self.pixels, side=self.side)

    @property
    def of_video(self) -> VideoLimits:
        return VideoLimits(self.of_image, frames=self.frames, pixels=self.video_pixels, seconds=self.video_s)


def decode(message: DecodeMedia, limits: DecodeLimits) -> MediaPayload:
    """Returns the requested raw pixels. Raises UnreadableMedia and any error of a library on damaged data."""
    format, data = _encoded(message, limits)
    check_bytes(len(data), limits.file_bytes)
    if message.modality == "video":
        pixels, shape = decode_video(data, format, limits.of_video)
        return MediaPayload(format="raw", data=pixels, shape=shape)
    return decode_image(data, format, limits)


def _encoded(message: DecodeMedia, limits: DecodeLimits) -> tuple[str | None, bytes]:
    """Returns the declared format, if any, and the bytes of the file."""
    if message.medium is not None:
        return message.medium.format, message.medium.data
    if message.base64 is not None:
        try:
            return None, base64.b64decode(message.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnreadableMedia(f"not base64: {error}") from error
    return None, read_below(message.path or "", limits.media_roots, limits.file_bytes)


def decode_image(data: bytes, format: str | None, limits: DecodeLimits) -> MediaPayload:
    """Returns the pixels [H, W, 3] of a PNG, JPEG or WebP file, which must have the declared format if there is one."""
    with open_header(data, limits.of_image, [format.upper()] if format else list(READERS)) as file:
        image = decode_exact(file)
    return MediaPayload(format="raw", data=image.tobytes(), shape=(image.height, image.width, 3))


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
    limit_process(limits.address_space)
    with suppress(PeerGone):
        while True:
            message = channel.receive()
            assert isinstance(message, DecodeMedia)
            channel.send(answer(message, limits))


if __name__ == "__main__":
    main()
