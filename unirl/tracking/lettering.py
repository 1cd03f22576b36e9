"""Text on images: choice of the font, width of a line, line breaks."""

from __future__ import annotations

import unicodedata
from functools import cache

from PIL import ImageDraw, ImageFont

from unirl.tracking.console import printable

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WIDE_FONTS = (
    "NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "SourceHanSansSC-Regular.otf", "wqy-microhei.ttc",
    "PingFang.ttc", "Arial Unicode.ttf", "msyh.ttc", "NotoSans-Regular.ttf", "DejaVuSans.ttf",
)  # fmt: skip
"""Fonts with many scripts, tried by name on this machine. The font that comes with PIL has only ASCII."""


def draw_text(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, size: int, colour: Colour, anchor: str
) -> None:
    """Draws one line; `anchor` as in PIL (`la` = left, top)."""
    spelled, font = lettering(text, size)
    draw.text(at, spelled, fill=colour, font=font, anchor=anchor)


def width_of(text: str, size: int) -> float:
    """Pixels from the left to the right end of a line."""
    spelled, font = lettering(text, size)
    return font.getlength(spelled)


def wrap(text: str, width: int, size: int, max_lines: int) -> list[str]:
    """Lines of at most `width` pixels. Long words are split; the last line ends with `...` if text is left out."""
    lines: list[str] = [""]
    for word in printable(text).split():
        for piece in _pieces(word, width, size):
            joined = f"{lines[-1]} {piece}".strip()
            if width_of(joined, size) <= width:
                lines[-1] = joined
            else:
                lines.append(piece)
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while last and width_of(last + " ...", size) > width:
        last = last[:-1]
    return [*lines[: max_lines - 1], last + " ..."]


def lettering(text: str, size: int) -> tuple[str, Font]:
    """The text that can be drawn, and its font. A letter that no font has loses its accent or becomes `?`."""
    text = printable(text)
    if text.isascii():
        return text, _ascii_font(size)
    font = _wide_font(size) or _ascii_font(size)
    return "".join(letter if _has(font, letter) else _plain(letter) for letter in text), font


@cache
def _has(font: Font, letter: str) -> bool:
    """Returns True if the font has a glyph for this letter."""
    return letter.isascii() or bytes(font.getmask(letter)) != bytes(font.getmask("\U0010ffff"))


def _plain(letter: str) -> str:
    bare = "".join(part for part in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(part))
    return bare.encode("ascii", "replace").decode()


@cache
def _ascii_font(size: int) -> Font:
    return ImageFont.load_default(size)


@cache
def _wide_font(size: int) -> Font | None:
    for name in WIDE_FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue  # not on this machine
    return None


def _pieces(word: str, width: int, size: int) -> list[str]:
    """Splits a word into pieces that fit. Texts without blanks, as in Chinese, may break anywhere."""
    pieces = [""]
    for character in word:
        if width_of(pieces[-1] + character, size) <= width:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces
