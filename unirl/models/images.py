"""Reads image files within bounds as upright, opaque RGB images, and places them in prompts."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unirl.config.errors import UniRLError, UnreadableFileError
from unirl.models.loading.remote_files import fetch, is_remote

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 8192 * 8192
"""Largest number of pixels of an image: 192 MiB after decoding to RGB."""
MAX_ASPECT = 200
"""Largest ratio of the sides. The vision towers of the Qwen-VL family reject a larger one."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""PIL's modes of images with at most 8 bits per channel."""
IMAGE_MARK = "<image>"
"""The placeholder of an image in a prompt. Without placeholders, all images come before the text."""


def read_image(uri: str) -> Image:
    """The image of `open_image` as RGB, with transparent parts on white."""
    image = open_image(uri)
    if image.has_transparency_data:
        from PIL import Image

        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(layer, mask=layer.getchannel("A"))
    return image.convert("RGB")


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
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(BytesIO(data), formats=["PNG"]).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{len(data)} bytes are no PNG file: {error}") from error


def open_image(uri: str) -> Image:
    """The image at a path or URL, rotated by its EXIF orientation. Its header is checked before its pixels are decoded.

    Raises:
        UnreadableFileError: the file is missing, damaged, too large, or of an unsupported kind.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(fetch(uri)) if is_remote(uri) else uri) as image:
            _check_header(uri, image)
            return ImageOps.exif_transpose(image)
    except FileNotFoundError as error:
        raise UnreadableFileError(f"image {uri} is not a file on this machine") from error
    except UniRLError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableFileError(f"image {uri} cannot be read: cannot identify image file") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # PIL raises these for damaged files.
        raise UnreadableFileError(f"image {uri} cannot be read: {error}") from error


def _check_header(uri: str, image: Image) -> None:
    width, height = image.size
    size = f"image {uri} has {width} x {height} pixels"
    if width * height > MAX_PIXELS:
        raise UnreadableFileError(f"{size}; at most {MAX_PIXELS:,} are decoded. Scale it down")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnreadableFileError(f"{size}; one side may be at most {MAX_ASPECT} times the other. Crop it")
    if image.mode not in MODES:
        allowed = ", ".join(MODES)
        raise UnreadableFileError(
            f"image {uri} has mode {image.mode}; save it with 8 bits per channel as one of {allowed}"
        )


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
