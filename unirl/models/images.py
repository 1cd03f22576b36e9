"""Picture files as models read them: whole, upright, opaque, in RGB, and not too large."""

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
"""Most pixels of a picture after decoding: 192 MiB in RGB."""
MAX_ASPECT = 200
"""Longest side over shortest: beyond it, vision towers of the Qwen-VL family take no picture."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""How PIL calls pictures of 8 bits a channel."""
IMAGE_MARK = "<image>"
"""Where a picture stands in a prompt; without any mark, all pictures stand before the text."""


def read_picture(uri: str) -> Image:
    """The picture at a path or an address, in RGB, the right way up; what is transparent in it is white.

    Raises:
        DataError: 4003, naming the file and the rule, where it is missing, damaged, too large or of another kind.
    """
    picture = _opened(uri)
    if picture.has_transparency_data:
        from PIL import Image

        layer = picture.convert("RGBA")
        picture = Image.new("RGB", picture.size, "white")
        picture.paste(layer, mask=layer.getchannel("A"))
    return picture.convert("RGB")


def fit_picture(picture: Image, height: int, width: int) -> Tensor:
    """[3, height, width] in [0, 1], on the 256 levels: the middle of the picture, scaled until it just covers the size.

    Nothing is stretched and nothing is padded (Lanczos; of the longer direction, equally much is cut at both ends). A
    picture that has the size already stays as it is.
    """
    from PIL import Image, ImageOps

    fitted = ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous().float().div_(255)


def picture_of(pixels: Tensor) -> Image:
    """The picture of PIL that shows pixels [3, H, W] in [0, 1], on the nearest of the 256 levels."""
    from PIL import Image

    return Image.fromarray(pixels.mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())


def _opened(uri: str) -> Image:
    """The picture with all its pixels read; its header is judged before they are."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(fetch(uri)) if is_remote(uri) else uri) as picture:
            _check_header(uri, picture)
            return ImageOps.exif_transpose(picture)
    except FileNotFoundError as error:
        raise UnreadableFileError(f"picture {uri} is no file of this machine") from error
    except UniRLError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableFileError(f"picture {uri} cannot be read: cannot identify image file") from error
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:  # as PIL meets the damage
        raise UnreadableFileError(f"picture {uri} cannot be read: {error}") from error


def _check_header(uri: str, picture: Image) -> None:
    width, height = picture.size
    size = f"picture {uri} has {width} x {height} pixels"
    if width * height > MAX_PIXELS:
        raise UnreadableFileError(f"{size}; at most {MAX_PIXELS:,} are decoded. Scale it down")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnreadableFileError(f"{size}; one side may be at most {MAX_ASPECT} times the other. Crop it")
    if picture.mode not in MODES:
        allowed = ", ".join(MODES)
        raise UnreadableFileError(
            f"picture {uri} is of mode {picture.mode}; save it with 8 bits a channel as one of {allowed}"
        )


def parts_of(text: str, num_images: int) -> list[str | None]:
    """A prompt as texts and pictures (None), in order. Raises ValueError where marks and pictures do not match."""
    if not num_images:
        return [text]
    texts = text.split(IMAGE_MARK)
    marks = len(texts) - 1
    if marks not in (0, num_images):
        raise ValueError(
            f"the text has {marks} marks {IMAGE_MARK} and the prompt brings {num_images} pictures. Give it as many, or "
            "no mark at all: then the pictures stand before the text"
        )
    if not marks:
        return [None] * num_images + [text]
    parts = [part for said in texts for part in (None, said)][1:]
    return [part for part in parts if part != ""]
