"""Image files as models read them: whole, upright, opaque, in RGB, and not too large."""

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
"""Most pixels of an image after decoding: 192 MiB in RGB."""
MAX_ASPECT = 200
"""Longest side over shortest: beyond it, vision towers of the Qwen-VL family take no image."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""How PIL calls images of 8 bits a channel."""
IMAGE_MARK = "<image>"
"""Where an image stands in a prompt; without any mark, all images stand before the text."""


def read_image(uri: str) -> Image:
    """The image at a path or an address, in RGB, the right way up; what is transparent in it is white.

    Raises:
        DataError: 4003, naming the file and the rule, where it is missing, damaged, too large or of another kind.
    """
    image = _opened(uri)
    if image.has_transparency_data:
        from PIL import Image

        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(layer, mask=layer.getchannel("A"))
    return image.convert("RGB")


def fit_image(image: Image, height: int, width: int) -> Tensor:
    """[3, height, width] in [0, 1], on the 256 levels: the middle of the image, scaled until it just covers the size.

    Nothing is stretched and nothing is padded (Lanczos; of the longer direction, equally much is cut at both ends). A
    image that has the size already stays as it is.
    """
    from PIL import Image, ImageOps

    fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous().float().div_(255)


def to_pil(pixels: Tensor) -> Image:
    """The image of PIL that shows pixels [3, H, W] in [0, 1], on the nearest of the 256 levels."""
    from PIL import Image

    return Image.fromarray(pixels.mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())


def _opened(uri: str) -> Image:
    """The image with all its pixels read; its header is judged before they are."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(fetch(uri)) if is_remote(uri) else uri) as image:
            _check_header(uri, image)
            return ImageOps.exif_transpose(image)
    except FileNotFoundError as error:
        raise UnreadableFileError(f"image {uri} is no file of this machine") from error
    except UniRLError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableFileError(f"image {uri} cannot be read: cannot identify image file") from error
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:  # as PIL meets the damage
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
            f"image {uri} is of mode {image.mode}; save it with 8 bits a channel as one of {allowed}"
        )


def split_at_images(text: str, num_images: int) -> list[str | None]:
    """A prompt as texts and images (None), in order. Raises ValueError where marks and images do not match."""
    if not num_images:
        return [text]
    texts = text.split(IMAGE_MARK)
    marks = len(texts) - 1
    if marks not in (0, num_images):
        raise ValueError(
            f"the text has {marks} marks {IMAGE_MARK} and the prompt brings {num_images} images. Give it as many, or "
            "no mark at all: then the images stand before the text"
        )
    if not marks:
        return [None] * num_images + [text]
    parts = [part for said in texts for part in (None, said)][1:]
    return [part for part in parts if part != ""]
