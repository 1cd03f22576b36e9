"""Pillow's bicubic resize and CLIP's preprocessing on any device, equal to the originals bit for bit.

Scores were published with images that Pillow resized. Pillow computes in integers, which float64 holds exactly, so any
device gets the same pixels, for a whole batch at once. Rows are resized first, as Pillow did when the scorers were
published; since version 13 it resizes the columns of some tall images first, which moves pixels by a level.
"""

from __future__ import annotations

from functools import cache
from math import copysign
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

UNIT = 2.0**22
"""Pillow's weights are integers, and this one is 1."""
RADIUS = 2.0
"""Pixels to either side that the bicubic filter reaches."""


def bicubic(x: float) -> float:
    """The weight at a distance of x pixels, by Keys' cubic convolution with a = -0.5 (Keys 1981)."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * a if x < 2.0 else 0.0


@cache
def resize_matrix(length: int, size: int, device: torch.device) -> Tensor:
    """The weight of each of `length` pixels in each of `size` pixels, float64 [length, size] of integers.

    A filter that reaches over the edge is cut there, and its weights are divided by their sum.
    """
    scale = length / size
    stretch = max(scale, 1.0)
    reach = RADIUS * stretch
    matrix = torch.zeros(length, size, dtype=torch.float64)
    for i in range(size):
        centre = (i + 0.5) * scale
        first, stop = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), length)
        weights = [bicubic((x - centre + 0.5) * (1.0 / stretch)) for x in range(first, stop)]
        total = 0.0
        for weight in weights:  # in order, as Pillow adds them; `sum` compensates rounding in newer Pythons
            total += weight
        matrix[first:stop, i] = torch.tensor([float(int(w / total * UNIT + copysign(0.5, w / total))) for w in weights])
    return matrix.to(device)


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """uint8 [..., height, width] of uint8 images [..., H, W]: `PIL.Image.resize` with the filter BICUBIC.

    Both passes round to 256 levels.
    """
    if images.shape[-1] != width:
        images = _resized_rows(images, width)
    if images.shape[-2] != height:
        images = _resized_rows(images.mT, height).mT
    return images


def _resized_rows(images: Tensor, width: int) -> Tensor:
    sums = images.double() @ resize_matrix(images.shape[-1], width, images.device)  # integers below 2^31: exact
    return (sums / UNIT + 0.5).floor_().clamp_(0, 255).to(torch.uint8)


def clip_input(images: Tensor, processor: BaseImageProcessor, values: Tensor) -> Tensor:
    """Float32 [B, 3, S, S] of uint8 images [B, 3, H, W]: what CLIP's image processor returns for these images.

    The shortest edge is resized, the centre is cropped, and each level is replaced by its value.

    Args:
        values: `level_values` of the processor, on the device of the images.
    """
    edge, side = processor.size["shortest_edge"], processor.crop_size["height"]
    height, width = images.shape[-2:]
    tall, wide = (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)
    images = resized(images, tall, wide)
    top, left = (tall - side) // 2, (wide - side) // 2
    channels = torch.arange(3, device=images.device)[:, None, None]
    return values[channels, images[..., top : top + side, left : left + side].long()]


def level_values(processor: BaseImageProcessor) -> Tensor:
    """The normalised value of each level in each channel, float32 [3, 256], computed by the image processor itself."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    values: Tensor = processor(levels, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
    return values.reshape(3, 256)
