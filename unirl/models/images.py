"""Reads image files within bounds as upright, opaque RGB images, and places them in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unirl.config.errors import UnreadableFileError
from unirl.media.files import ImageLimits, UnreadableMedia, read_regular
from unirl.media.memory import MemoryBudget
from unirl.models.loading.remote_files import fetch, is_remote

if TYPE_CHECKING:
    from PIL.Image import Image

MIB = 2**20
MAX_BYTES = 64 * MIB
"""Largest size of an image file."""
LIMITS = ImageLimits(pixels=8192 * 8192, aspect=200)
"""Pillow has 4 bytes per pixel, so the largest image takes 256 MiB. The vision towers of the Qwen-VL family reject a
larger ratio of the sides."""
MEMORY = MemoryBudget(512 * MIB)
"""Memory of all images that the threads of this process decode at once."""
IMAGE_MARK = "<image>"
"""The placeholder of an image in a prompt. Without placeholders, all images come before the text."""


@dataclass(frozen=True)
class MediaFile:
    """A file, as it was read once."""

    uri: str
    """The path or URL."""
    content: bytes


@dataclass(frozen=True)
class DecodedImage:
    """An upright RGB image, which is the first of the frames of its file."""

    image: Image
    num_frames: int


def read_image(uri: str) -> Image:
    """The first frame of the image at a path or URL as RGB, upright, with transparent parts on white.

    Raises:
        UnreadableFileError: the file is missing, damaged, too large, or of an unsupported kind.
    """
    return decode_file(read_file(uri)).image


def read_file(uri: str) -> MediaFile:
    """The content of the file at a path or URL. Raises UnreadableFileError (4003)."""
    if is_remote(uri):
        return MediaFile(uri, fetch(uri))
    try:
        return MediaFile(uri, read_regular(uri, MAX_BYTES))
    except FileNotFoundError as error:
        raise UnreadableFileError(f"image {uri} is not a file on this machine") from error
    except (OSError, UnreadableMedia, ValueError) as error:  # ValueError: the path has a null character
        raise UnreadableFileError(f"image {uri} cannot be read: {error}") from error


def decode_file(file: MediaFile, opaque: bool = False) -> DecodedImage:
    """The image of a file, decoded in this process, or in one of its own if its size does not bound the work.

    All threads of this process decode at most `MEMORY` at once.

    Args:
        opaque: refuse transparent parts instead of placing them on white.

    Raises:
        UnreadableFileError: 4003 the file is damaged, too large, or of an unsupported kind.
    """
    from unirl.media.images import BYTES_PER_PIXEL, decode_upright, is_plain, num_frames_of, open_header
    from unirl.media.process import decode_apart

    try:
        with open_header(file.content, LIMITS) as image:
            frames = num_frames_of(image)
            with MEMORY.hold(BYTES_PER_PIXEL * image.width * image.height):
                if is_plain(image, file.content):
                    return DecodedImage(decode_upright(image, opaque), frames)
                return DecodedImage(decode_apart(file.content, LIMITS, opaque), frames)
    except UnreadableMedia as error:
        raise UnreadableFileError(f"image {file.uri} cannot be read: {error}") from error


def fit_image(image: Image, height: int, width: int) -> Tensor:
    """Pixels [3, height, width] in [0, 1], 256 levels: the image scaled to cover the size and cropped at its centre.

    The aspect ratio is kept and nothing is padded (Lanczos). An image that already has the size is unchanged.
    """
    from PIL import Image, ImageOps

    fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous().float().div_(255)


def to_pil(pixels: Tensor) -> Image:
    """The PIL image of pixels [3, H, W] in [0, 1], rounded to 256 levels."""
    from PIL import Image

    return Image.fromarray(pixels.mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())


def png_of(levels: Tensor) -> bytes:
    """A PNG file of the levels [3, H, W] uint8."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(levels.permute(1, 2, 0).cpu().numpy()).save(file, format="PNG", compress_level=1)
    return file.getvalue()


def png_image(data: bytes) -> Image:
    """The image in a PNG file as RGB. Raises ValueError if it is none."""
    from unirl.media.images import decode_upright, open_header

    try:
        return decode_upright(open_header(data, LIMITS, ["PNG"]))
    except UnreadableMedia as error:
        raise ValueError(f"{len(data)} bytes are no PNG file: {error}") from error


def with_marks(text: str, num_images: int) -> str:
    """A prompt with a placeholder for each of its images. Raises ValueError if it has some, but not as many."""
    return "".join(IMAGE_MARK if part is None else part for part in split_at_images(text, num_images))


def split_at_images(text: str, num_images: int) -> list[str | None]:
    """A prompt as texts and images (None), in order. Raises ValueError if placeholders and images do not match."""
    if not num_images:
        return [text]
    texts = text.split(IMAGE_MARK)
    marks = len(texts) - 1
    if marks not in (0, num_images):
        raise ValueError(
            f"the text has {marks} placeholders {IMAGE_MARK}, but the prompt has {num_images} images. Write one per "
            "image, or none at all: then the images come before the text"
        )
    if not marks:
        return [None] * num_images + [text]
    parts = [part for piece in texts for part in (None, piece)][1:]
    return [part for part in parts if part != ""]
