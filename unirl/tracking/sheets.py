"""Contact sheets and before/after sheets, drawn with PIL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw

from unirl.tracking.lettering import Colour, draw_text, width_of, wrap
from unirl.tracking.samples import Media, SampleGroup, SampleTable, Sides, pairs_of

BACKGROUND = (250, 250, 247)
INK = (32, 36, 43)
MUTED = (112, 118, 128)
RULE = (226, 227, 222)
LOW, MIDDLE, HIGH = (201, 92, 60), (226, 176, 74), (38, 140, 124)
"""Colours of small, medium and large rewards, distinguishable with red-green colour blindness."""

TILE = 128
"""Width of a tile in pixels. The height follows from the shape of the image."""
GAP = 10
MARGIN = 36
LABEL = 210
CAPTION = 24
BAR = 4
BELOW = 36
"""Empty pixels below a prompt."""
TITLE_SIZE, HEAD_SIZE, TEXT_SIZE, SMALL_SIZE = 26, 17, 16, 14
TOP, HEADING = MARGIN + 72, 48
"""Top of the first row, and the height of the column headings above it."""
BETWEEN = 36
"""Pixels between blocks that are side by side."""
PAGE, MIN_WIDTH = 1330, 560
MAX_GROUPS = 64
MAX_PER_ROW = 8
FEWEST_SHOWN = 2
"""Smallest number of samples per prompt on a before/after sheet, even if only one tile fits into a row."""


@dataclass(frozen=True)
class Tiles:
    """The images that a sheet shows, and their layout."""

    images: Sequence[np.ndarray]  # one per row, [H, W, 3] uint8, all of one size
    width: int
    """Size on the sheet in pixels."""
    height: int
    across: int = MAX_PER_ROW
    """Tiles of a prompt that fit side by side."""
    about: str = ""
    """One phrase that describes all tiles."""


class TiledMedia(Media, Protocol):
    """Media that can be shown on a sheet."""

    def tiles(self) -> Tiles:
        """One image per sample."""
        ...


@dataclass(frozen=True)
class Rectangle:
    """A rectangle on the sheet, pixels."""

    x: int
    y: int
    width: int
    height: int


class Sheet:
    """A page of fixed size with margins, a title and functions that draw on it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.image = Image.new("RGB", (width, height), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.text(MARGIN, MARGIN - 6, title, TITLE_SIZE)

    def subtitle(self, text: str) -> None:
        self.text(MARGIN, MARGIN + 28, text, TEXT_SIZE, MUTED)

    def text(self, x: int, y: int, text: str, size: int, colour: Colour = INK, anchor: str = "la") -> None:
        draw_text(self.draw, (x, y), text, size, colour, anchor)

    def wrapped(self, box: Rectangle, text: str, size: int) -> int:
        """Draws text within the width of a box, shortened to its height; returns the y below the text."""
        y = box.y
        for line in wrap(text, box.width, size, max_lines=max(box.height // (size + 5), 1)):
            self.text(box.x, y, line, size)
            y += size + 5
        return y

    def rule(self, y: int) -> None:
        self.draw.line([(MARGIN, y), (self.image.width - MARGIN, y)], fill=RULE, width=1)

    def tile(self, box: Rectangle, image: np.ndarray, caption: str, level: float) -> None:
        """Draws one image [H, W, 3]. Below it are its reward as text and a bar whose length and colour show `level`."""
        self.image.paste(fit(image, box.width, box.height), (box.x, box.y))
        y = box.y + box.height + 2
        self.draw.rectangle([box.x, y, box.x + box.width - 1, y + BAR - 1], fill=RULE)
        self.draw.rectangle([box.x, y, box.x + max(round((box.width - 1) * level), 1), y + BAR - 1], fill=shade(level))
        self.text(box.x + box.width // 2, y + BAR + 3, caption, SMALL_SIZE, MUTED, anchor="ma")


def contact_sheet(table: SampleTable[TiledMedia], title: str) -> Image.Image:
    """Samples by prompt, highest reward first, with the prompt and its mean reward beside them."""
    groups = table.groups()[:MAX_GROUPS]
    tiles = table.media.tiles()
    columns = min(max(len(group.rows) for group in groups), tiles.across)
    block = LABEL + columns * (tiles.width + GAP) - GAP
    bands = _bands(groups, block, [_height(tiles, len(group.rows), columns) for group in groups])
    sheet = Sheet(_page_width(bands, block), TOP + sum(band.height for band in bands) + MARGIN - GAP, title)
    sheet.subtitle(_summary(table, len(groups), tiles.about))
    scale = RewardScale.of(table)
    y = TOP
    for band in bands:
        sheet.rule(y - 9)
        for x, index in zip(_lefts(block), band.members, strict=False):
            group = groups[index]
            _label(sheet, Rectangle(x, y, LABEL - 14, _height(tiles, len(group.rows), columns) - BELOW), group)
            _draw(sheet, table, tiles, Places(group.best_first(), x + LABEL, y, columns), scale)
        y += band.height
    return sheet.image


def before_after_sheet(
    before: SampleTable[TiledMedia], after: SampleTable[TiledMedia], names: Sides, title: str
) -> Image.Image:
    """One row per prompt, with samples before training on the left and after it on the right.

    Samples keep their order, so the k-th samples on both sides have the same noise. If a prompt has more samples than
    fit, the first ones are shown; the means include all.
    """
    pairs = pairs_of(before, after)[:MAX_GROUPS]
    both = (before.media.tiles(), after.media.tiles())
    size = max(both, key=lambda tiles: tiles.width)
    shown = min(max(len(old.rows) for old, _ in pairs), max(size.across // 2, FEWEST_SHOWN))
    columns = min(shown, max(size.across // 2, 1))
    half = columns * (size.width + GAP) - GAP
    block = LABEL + 2 * half + 3 * GAP
    heights = [_height(size, min(max(len(old.rows), len(new.rows)), shown), columns) for old, new in pairs]
    bands = _bands(pairs, block, heights)
    sheet = Sheet(_page_width(bands, block), TOP + HEADING + sum(band.height for band in bands) + MARGIN - GAP, title)
    sheet.subtitle(_rise(before, after, both[1].about))
    lefts = (LABEL, LABEL + half + 3 * GAP)
    sides = list(zip(lefts, (before, after), both, names, strict=True))
    scale = RewardScale.of(before, after)
    y = TOP + HEADING
    for x, _ in zip(_lefts(block), bands[0].members, strict=False):
        for left, table, _, name in sides:
            _heading(sheet, Rectangle(x + left, y - HEADING + 4, half, HEADING), name, table.mean_reward)
    for band in bands:
        sheet.rule(y - 9)
        for x, index in zip(_lefts(block), band.members, strict=False):
            _pair_label(sheet, Rectangle(x, y, LABEL - 14, heights[index] - BELOW), *pairs[index])
            for (left, table, tiles, _), group in zip(sides, pairs[index], strict=True):
                _draw(sheet, table, tiles, Places(group.rows[:shown], x + left, y, columns), scale)
        y += band.height
    return sheet.image


@dataclass(frozen=True)
class Band:
    """Indices of the groups that are side by side on the page."""

    members: tuple[int, ...]
    height: int


def _bands(groups: Sequence[object], block: int, heights: Sequence[int]) -> list[Band]:
    """Arranges blocks of one width below each other, and side by side if the page would become too long."""
    fitting = max((PAGE + BETWEEN) // (block + BETWEEN), 1)
    across = min(-(-sum(heights) // PAGE), fitting)
    numbers = [tuple(range(start, min(start + across, len(groups)))) for start in range(0, len(groups), across)]
    return [Band(members, max(heights[member] for member in members)) for members in numbers]


def _lefts(block: int) -> Iterator[int]:
    return count(MARGIN, block + BETWEEN)


def _page_width(bands: Sequence[Band], block: int) -> int:
    across = len(bands[0].members)
    return max(2 * MARGIN + across * (block + BETWEEN) - BETWEEN, MIN_WIDTH)


def _row_height(tiles: Tiles) -> int:
    return tiles.height + BAR + CAPTION + GAP + 8


def _height(tiles: Tiles, count: int, columns: int) -> int:
    """Pixels that `count` tiles need in `columns` columns."""
    return _row_height(tiles) * -(-count // columns)


@dataclass(frozen=True)
class Places:
    """Rows of the table and where they are drawn: from (x, y) to the right, then below."""

    rows: Sequence[int]
    x: int
    y: int
    columns: int


def _draw(sheet: Sheet, table: SampleTable[TiledMedia], tiles: Tiles, places: Places, scale: RewardScale) -> None:
    for position, row in enumerate(places.rows):
        down, right = divmod(position, places.columns)
        x, y = places.x + right * (tiles.width + GAP), places.y + down * _row_height(tiles)
        reward = table.rows[row].reward
        box = Rectangle(x, y, tiles.width, tiles.height)
        sheet.tile(box, tiles.images[row], f"{reward:.2f}", scale.fraction(reward))


def _heading(sheet: Sheet, box: Rectangle, name: str, mean: float) -> None:
    """Draws the name and mean of a column, on one line if they fit."""
    text = f"mean {mean:.2f}"
    if width_of(f"{name}   {text}", HEAD_SIZE) <= box.width:
        sheet.text(box.x, box.y + 6, name, HEAD_SIZE)
        sheet.text(box.x + box.width, box.y + 6, text, HEAD_SIZE, MUTED, anchor="ra")
    else:
        sheet.text(box.x, box.y - 6, name, SMALL_SIZE)
        sheet.text(box.x, box.y + 11, text, SMALL_SIZE, MUTED)


@dataclass(frozen=True)
class RewardScale:
    """Maps rewards to [0, 1]: from the range of all shown rewards, or unchanged if all lie in [0, 1]."""

    low: float
    high: float

    @staticmethod
    def of(*tables: SampleTable[TiledMedia]) -> RewardScale:
        rewards = [row.reward for table in tables for row in table.rows]
        if min(rewards) >= 0 and max(rewards) <= 1:
            return RewardScale(0.0, 1.0)
        return RewardScale(min(rewards), max(rewards))

    def fraction(self, reward: float) -> float:
        return (reward - self.low) / (self.high - self.low) if self.high > self.low else 1.0


def tile_size(images: np.ndarray) -> tuple[int, int]:
    """(width, height) of a tile for images [B, H, W, 3]. Small images are enlarged by an integer factor."""
    height, width = images.shape[1:3]
    if width <= TILE:
        return width * (TILE // width), height * (TILE // width)
    return TILE * 2, round(TILE * 2 * height / width)


def fit(pixels: np.ndarray, width: int, height: int) -> Image.Image:
    """The image [H, W, 3] uint8 in another size: enlarged by repeating pixels, reduced by averaging them."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if image.width <= width:
        return image.resize((width, height), Image.Resampling.NEAREST)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def shade(level: float) -> Colour:
    """The colour of a level in [0, 1]."""
    first, second, part = (LOW, MIDDLE, 2 * level) if level < 0.5 else (MIDDLE, HIGH, 2 * level - 1)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _label(sheet: Sheet, box: Rectangle, group: SampleGroup) -> None:
    y = sheet.wrapped(box, group.prompt, TEXT_SIZE)
    if len(group.rows) > 1:
        sheet.text(box.x, y + 2, f"mean {group.mean_reward:.2f}", SMALL_SIZE, MUTED)


def _pair_label(sheet: Sheet, box: Rectangle, old: SampleGroup, new: SampleGroup) -> None:
    y = sheet.wrapped(box, old.prompt, TEXT_SIZE)
    colour = HIGH if new.mean_reward > old.mean_reward else MUTED
    sheet.text(box.x, y + 2, f"{old.mean_reward:.2f} to {new.mean_reward:.2f}", SMALL_SIZE, colour)


def _summary(table: SampleTable[TiledMedia], shown: int, about: str) -> str:
    more = f", {shown} of {len(table.groups())} prompts shown" if shown < len(table.groups()) else ""
    return f"mean reward {table.mean_reward:.3f}, {len(table.rows)} samples, highest first{more}{_also(about)}"


def _rise(before: SampleTable[TiledMedia], after: SampleTable[TiledMedia], about: str) -> str:
    change = f"mean reward {before.mean_reward:.3f} to {after.mean_reward:.3f}"
    return f"evaluation prompts, same noise; {change}{_also(about)}"


def _also(about: str) -> str:
    return f"; {about}" if about else ""


def saved(sheet: Image.Image, path: Path) -> Path:
    """Saves the sheet and returns the path."""
    sheet.save(path)
    return path
