"""Decodes images of a few formats, after their headers were checked.

    decode_upright   an RGB image for a prompt: rotation undone, transparent parts on white, the first of several frames
    decode_exact     the pixels that a file stores, for a reward; refuses everything that needs a decision

Pillow would try about 50 formats, one of which (EPS) starts Ghostscript.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageFile, ImageOps, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

from unirl.media.files import ImageLimits, UnreadableMedia

READERS = {"PNG": PngImagePlugin, "JPEG": JpegImagePlugin, "WEBP": WebPImagePlugin}
"""The only formats that are read. They are imported here, so that the first image does not take longer than others."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pillow's modes of images with at most 8 bits per channel."""
PLAIN_MODES = ("RGB", "L", "P", "1")
"""Those that RGB holds without loss."""
ORIENTATION = 0x0112
"""The EXIF tag for rotation and mirroring."""
PLAIN_PIXELS = 4096 * 4096
PLAIN_SCANS = 64
"""A progressive JPEG file usually has 10 scans. Each takes as long as an image, and a few bytes are enough for one."""
BYTES_PER_PIXEL = 12
"""Largest memory of decoding: three images of 4 bytes per pixel, which are that of the file and two conversions."""


@contextmanager
def damage_reported() -> Iterator[None]:
    """Raises UnreadableMedia for any error of an image library."""
    try:
        yield
    except (UnreadableMedia, MemoryError):
        raise
    except Exception as error:  # decoders raise almost anything on damaged data
        raise UnreadableMedia(f"it is damaged ({type(error).__name__}: {str(error)[:200]})") from error


def open_header(data: bytes, limits: ImageLimits, formats: list[str] | tuple[str, ...] = tuple(READERS)) -> Image.Image:
    """Returns the image of a file, whose pixels are not decoded yet. Raises UnreadableMedia."""
    # A library that some reward imports may have set this. Missing pixels would then be gray instead of an error.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with damage_reported():
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except UnidentifiedImageError as error:
            raise UnreadableMedia(f"it does not begin as a {' or '.join(formats)} file") from error
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnreadableMedia(f"too many pixels: {error}") from error
    limits.check(image.width, image.height)
    return image


def num_frames_of(image: Image.Image) -> int:
    """Returns the number of frames; 1 for a still image."""
    return int(getattr(image, "n_frames", 1))  # only Pillow's classes of formats with animations have it


def is_plain(image: Image.Image, data: bytes) -> bool:
    """Returns True if the size of an opened image bounds the memory and time of decoding it to those of a photo."""
    scans = data.count(b"\xff\xda") if isinstance(image, JpegImagePlugin.JpegImageFile) else 1
    return image.width * image.height <= PLAIN_PIXELS and scans <= PLAIN_SCANS


def decode_upright(image: Image.Image, opaque: bool = False) -> Image.Image:
    """Returns the first frame of an opened image as RGB, upright by its EXIF orientation, on white if transparent.

    Args:
        opaque: refuse transparent parts instead.

    Raises UnreadableMedia.
    """
    if image.mode not in MODES:
        raise UnreadableMedia(f"it has mode {image.mode}: save it with 8 bits per channel as one of {', '.join(MODES)}")
    with damage_reported():
        ImageOps.exif_transpose(image, in_place=True)
        image.load()
        if not image.has_transparency_data:
            # A WebP image keeps its decoder, whose buffers are larger than the pixels; a copy does not.
            as_is = image.mode == "RGB" and not isinstance(image, WebPImagePlugin.WebPImageFile)
            return image if as_is else image.convert("RGB")
        layer = image.convert("RGBA")
        alpha = layer.getchannel("A")
        if opaque and alpha.getextrema() != (255, 255):
            raise UnreadableMedia("it has transparent parts, and their background is unknown; save it as opaque")
        upright = Image.new("RGB", image.size, "white")
        upright.paste(layer, mask=alpha)
        return upright


def decode_exact(image: Image.Image) -> Image.Image:
    """Returns the pixels of an opened image as RGB. Raises UnreadableMedia if RGB cannot hold what the file shows."""
    frames = num_frames_of(image)
    if frames != 1:
        raise UnreadableMedia(f"an animation of {frames} frames: send one image")
    with damage_reported():
        if image.getexif().get(ORIENTATION, 1) != 1:
            raise UnreadableMedia("its EXIF orientation rotates the image: save it upright")
        if image.mode in PLAIN_MODES and "transparency" not in image.info:
            return image.convert("RGB")
        if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
            return image.convert("RGB")
    raise UnreadableMedia(f"mode {image.mode} has transparency or other than 8-bit colors: save the image as RGB")
