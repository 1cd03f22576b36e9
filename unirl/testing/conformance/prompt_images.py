"""The images in the prompts of a request, and faults that change them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.models.images import png_image, png_of


def images_in(body: Mapping[str, Any], count: int, is_batch: bool) -> list[list[bytes]]:
    """The image files of each prompt. Raises binascii.Error for one that is no base64."""
    given = body.get("image_data")
    if given is None:
        return [[] for _ in range(count)]
    rows = [row if isinstance(row, list) else [row] for row in (given if is_batch else [given])]
    return [[base64.b64decode(image.rpartition(",")[2], validate=True) for image in row] for row in rows]


def reduced(image: bytes) -> bytes:
    """The image with half the width and height."""
    return png_of(levels_in(image)[:, ::2, ::2])


def recoloured(image: bytes) -> bytes:
    """The image with blue in place of red."""
    return png_of(levels_in(image).flip(0))


def levels_in(image: bytes) -> Tensor:
    """The levels [3, H, W] uint8 of a PNG file."""
    return torch.from_numpy(np.array(png_image(image))).permute(2, 0, 1)


REPAINTS: Mapping[str | None, Callable[[bytes], bytes]] = {"other-image-size": reduced, "other-colours": recoloured}
"""Fault to what it does with an image file."""
