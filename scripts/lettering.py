"""Images of words, drawn with the fonts inside Pillow and OpenCV. Other scripts, benchmarks and tests import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ink = NDArray[np.uint8]
"""[H, W] coverage of each pixel by ink, 0 to 255."""


def ink_of(font_file: str | None) -> Callable[[str, int], Ink]:
    """A function that draws text with a font file. None = the outline font inside Pillow."""

    def draw(text: str, height: int) -> Ink:
        from PIL import Image, ImageDraw, ImageFont

        font = ImageFont.truetype(font_file, height) if font_file else ImageFont.load_default(size=height)
        left, top, right, bottom = font.getbbox(text)
        page = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
        ImageDraw.Draw(page).text((1 - left, 1 - top), text, fill=255, font=font)
        return np.asarray(page)

    return draw


def _typewriter(text: str, height: int) -> Ink:
    """Text in the bitmap font of Pillow, 11 pixels high, with each pixel enlarged to a block."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default_imagefont()
    _, _, right, bottom = font.getbbox(text)
    page = Image.new("L", (int(right) + 1, int(bottom) + 1))
    ImageDraw.Draw(page).text((0, 0), text, fill=255, font=font)
    block = max(1, round(height / 11))
    return np.asarray(page).repeat(block, 0).repeat(block, 1)


def _opencv(style: str, slant: str | None = None) -> Callable[[str, int], Ink]:
    def draw(text: str, height: int) -> Ink:
        import cv2

        font = getattr(cv2, style) | (getattr(cv2, slant) if slant else 0)
        scale, thick = height / 30, max(1, height // 16)
        (width, above), below = cv2.getTextSize(text, font, scale, thick)
        page = np.zeros((above + below + 2 * thick, width + 2 * thick), dtype=np.uint8)
        return np.asarray(cv2.putText(page, text, (thick, above + thick), font, scale, 255, thick, cv2.LINE_AA))

    return draw


FONTS: dict[str, Callable[[str, int], Ink]] = {
    "outline": ink_of(None),
    "typewriter": _typewriter,
    "plain": _opencv("FONT_HERSHEY_SIMPLEX"),
    "heavy": _opencv("FONT_HERSHEY_TRIPLEX"),
    "slanted": _opencv("FONT_HERSHEY_SIMPLEX", "FONT_ITALIC"),
}
"""Functions from text and letter height in pixels to ink. `plain`, `heavy` and `slanted` need OpenCV."""

BLACK_ON_WHITE = ((0, 0, 0), (255, 255, 255))


def lettered(
    lines: Sequence[str],
    *,
    font: str = "outline",
    size: int = 256,
    height: int = 32,
    colors: tuple[tuple[int, int, int], tuple[int, int, int]] = BLACK_ON_WHITE,
    turn: float = 0.0,
) -> Tensor:
    """[3, size, size] in [0, 1], an image of `lines` centred on a plain background.

    Args:
        colors: (red, green, blue) of ink and background.
        turn: rotation in degrees, counterclockwise.

    Raises:
        ValueError: the text does not fit.
    """
    from PIL import Image

    page = Image.new("L", (size, size))
    inks = [FONTS[font](line, height) for line in lines]
    step = max(len(ink) for ink in inks) + height // 3
    for number, ink in enumerate(inks):
        middle = size // 2 + round((number - (len(inks) - 1) / 2) * step)
        left, top = (size - ink.shape[1]) // 2, middle - len(ink) // 2
        if left < 0 or top < 0 or top + len(ink) > size:
            raise ValueError(f"{lines[number]!r} at height {height} does not fit into {size} pixels")
        page.paste(Image.fromarray(ink), (left, top))
    cover = np.asarray(page.rotate(turn, Image.Resampling.BICUBIC), dtype=np.float64)[..., None] / 255
    ink_color, ground = (np.array(color, dtype=np.float64) for color in colors)
    pixels = (ground + cover * (ink_color - ground)).round() / 255
    return torch.from_numpy(pixels).float().permute(2, 0, 1)
