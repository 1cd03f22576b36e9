"""Contact sheets and before/after sheets, drawn with PIL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from PIL import Image, ImageDraw

from unirl.tracking.lettering import Colour, draw_text, width_of, wrap
from unirl.tracking.samples import REWRITE, Gallery, Media, SampleRow, SampleTable, Sides, direction, pairs_of

BACKGROUND = (250, 250, 247)
INK = (32, 36, 43)
MUTED = (112, 118, 128)
RULE = (226, 227, 222)
LOW, MIDDLE, HIGH = (201, 92, 60), (226, 176, 74), (38, 140, 124)
"""Colours of small, medium and large rewards, distinguishable with red-green colour blindness."""

CHANGED = {1: HIGH, 0: MUTED, -1: LOW}
"""Colours of a mean that rose, that did not change by more than noise, and that fell."""

TILE = 128
"""Width of a tile in pixels. The height follows from the shape of the image."""
GAP = 10
MARGIN = 36
LABEL = 210
CAPTION = 24
LINE = 18
"""Height of each further line below a tile."""
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
MAX_COMPARED = 18
"""Prompts on a before/after sheet, which should fit a screen or two. Of more, as many are taken evenly."""
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
    """Media that are shown on sheets."""

    def tiles(self) -> Tiles:
        """One image per sample."""
        ...

    def page(self, table: SampleTable[Self], folder: Path, title: str) -> Path:
        """Writes a contact sheet."""
        return saved(contact_sheet(table, title), folder / "contact_sheet.png")

    def comparison(self, before: SampleTable[Self], after: SampleTable[Self], sides: Sides, folder: Path) -> Path:
        sheet = before_after_sheet(before, after, sides, "Before and after training")
        return saved(sheet, folder / "before_after.png")


@dataclass(frozen=True)
class Rectangle:
    """A rectangle on the sheet, pixels."""

    x: int
    y: int
    width: int
    height: int


class Sheet:
    """A page with margins, a title and functions that draw on it, at least as wide as its subtitle."""

    def __init__(self, width: int, height: int, title: str, subtitle: str) -> None:
        width = max(width, round(width_of(subtitle, TEXT_SIZE)) + 2 * MARGIN)
        self.image = Image.new("RGB", (width, height), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.text(MARGIN, MARGIN - 6, title, TITLE_SIZE)
        self.text(MARGIN, MARGIN + 28, subtitle, TEXT_SIZE, MUTED)

    def text(self, x: int, y: int, text: str, size: int, colour: Colour = INK, anchor: str = "la") -> None:
        draw_text(self.draw, (x, y), text, size, colour, anchor)

    def wrapped(self, box: Rectangle, text: str, size: int) -> int:
        """Draws text within the width of a box, shortened to its height; returns the y below the text."""
        y = box.y
        for line in wrap(text, box.width, size, max_lines=max(box.height // (size + 5), 1)):
            self.text(box.x, y, line, size)
            y += size + 5
        return y

    def tile(self, box: Rectangle, image: np.ndarray, captions: Sequence[str], level: float) -> None:
        """Draws one image [H, W, 3]. Below it are a bar whose length and colour show `level`, and lines of text."""
        self.image.paste(fit(image, box.width, box.height), (box.x, box.y))
        y = box.y + box.height + 2
        self.draw.rectangle([box.x, y, box.x + box.width - 1, y + BAR - 1], fill=RULE)
        self.draw.rectangle([box.x, y, box.x + max(round((box.width - 1) * level), 1), y + BAR - 1], fill=shade(level))
        for number, caption in enumerate(captions):
            below = y + BAR + 3 + number * LINE
            self.text(
                box.x + box.width // 2, below, wrap(caption, box.width, SMALL_SIZE, 1)[0], SMALL_SIZE, MUTED, "ma"
            )


@dataclass(frozen=True)
class Side:
    """The samples in one column of a sheet."""

    table: SampleTable[TiledMedia]
    tiles: Tiles
    heading: str = ""


@dataclass(frozen=True)
class Block:
    """One prompt on a sheet, and the rows that each side shows of it."""

    prompt: str
    means: str
    colour: Colour
    """Colour of `means`."""
    rows: tuple[Sequence[int], ...]


@dataclass(frozen=True)
class Grid:
    """How the tiles of a sheet are laid out and captioned."""

    columns: int
    """Tiles of a block that are side by side, on each side."""
    row_height: int
    bounds: tuple[float, float]
    """The smallest and largest reward of the sheet."""
    has_rewrites: bool
    """Below each image stands the prompt that it was drawn from, which is not the prompt of its block."""

    def captions(self, row: SampleRow) -> list[str]:
        """The lines below an image."""
        return [f"{row.reward:.2f}", *([str(row.facts.get(REWRITE, row.prompt))] if self.has_rewrites else [])]


def contact_sheet(table: SampleTable[TiledMedia], title: str) -> Image.Image:
    """Samples by prompt with its mean reward beside them; prompts, and the samples of each, highest reward first."""
    groups = table.best_groups()
    shown = groups[:MAX_GROUPS]
    tiles = table.media.tiles()
    columns = min(max(len(group.rows) for group in shown), tiles.across)
    means = [f"mean {group.mean_reward:.2f}" if len(group.rows) > 1 else "" for group in shown]
    blocks = [Block(group.prompt, mean, MUTED, (group.best_first(),)) for group, mean in zip(shown, means, strict=True)]
    more = f", {len(shown)} of {len(groups)} prompts shown" if len(shown) < len(groups) else ""
    summary = f"{table.reward_text()}; highest first{more}{_about(table, tiles)}"
    return _sheet([Side(table, tiles)], blocks, columns, (title, summary))


def before_after_sheet(
    before: SampleTable[TiledMedia], after: SampleTable[TiledMedia], names: Sides, title: str
) -> Image.Image:
    """One row per prompt, with samples before training on the left and after it on the right.

    Samples keep their order, so the k-th samples on both sides have the same noise. If a prompt has more samples than
    fit, the first ones are shown; the means include all. Of more prompts than `MAX_COMPARED`, evenly spaced ones are
    shown. Means are coloured only if they changed by more than noise.
    """
    every = pairs_of(before, after)
    count = min(len(every), MAX_COMPARED)
    pairs = [every[len(every) * place // count] for place in range(count)]
    sides = [Side(table, table.media.tiles(), name) for table, name in zip((before, after), names, strict=True)]
    across = _widest(sides).across // 2
    shown = min(max(len(old.rows) for old, _ in pairs), max(across, FEWEST_SHOWN))
    blocks = [
        Block(
            old.prompt,
            f"{old.mean_reward:.2f} to {new.mean_reward:.2f}",
            CHANGED[direction(old, new)],
            (old.rows[:shown], new.rows[:shown]),
        )
        for old, new in pairs
    ]
    change = f"mean reward of {after.count_text()} {before.mean_reward:.3f} to {after.mean_reward:.3f}"
    more = f", {count} of {len(every)} prompts shown" if count < len(every) else ""
    summary = f"evaluation prompts, same noise{more}; {change}{_about(after, sides[1].tiles)}"
    return _sheet(sides, blocks, min(shown, max(across, 1)), (title, summary))


def gallery_sheet(tiles: Tiles, drawn: Gallery) -> Image.Image:
    """Samples without rewards, a row per prompt, with the prompt and the number of each sample."""
    columns = min(drawn.per_prompt, tiles.across)
    down = -(-drawn.per_prompt // columns)
    height = max(down * (tiles.height + CAPTION), TILE) + BELOW
    width = max(2 * MARGIN + LABEL + GAP + columns * (tiles.width + GAP), MIN_WIDTH)
    sheet = Sheet(width, TOP + len(drawn.prompts) * height + MARGIN, "Samples", drawn.title)
    for number, prompt in enumerate(drawn.prompts):
        y = TOP + number * height
        sheet.wrapped(Rectangle(MARGIN, y, LABEL - GAP, height - BELOW), prompt, TEXT_SIZE)
        for place in range(drawn.per_prompt):
            x = MARGIN + LABEL + place % columns * (tiles.width + GAP)
            top = y + place // columns * (tiles.height + CAPTION)
            sheet.image.paste(fit(tiles.images[number * drawn.per_prompt + place], tiles.width, tiles.height), (x, top))
            sheet.text(x + tiles.width // 2, top + tiles.height + 4, f"sample {place}", SMALL_SIZE, MUTED, anchor="ma")
    return sheet.image


def _sheet(sides: Sequence[Side], blocks: Sequence[Block], columns: int, titles: tuple[str, str]) -> Image.Image:
    """Draws blocks below each other, and also side by side if the page would become too long.

    Args:
        columns: tiles of a block that are side by side, on each side.
    """
    size = _widest(sides)
    has_rewrites = any(REWRITE in row.facts for side in sides for row in side.table.rows)
    row_height = size.height + BAR + CAPTION + GAP + 8 + (LINE if has_rewrites else 0)
    grid = Grid(columns, row_height, _reward_bounds(sides), has_rewrites)
    half = columns * (size.width + GAP) - GAP
    lefts = [LABEL + number * (half + 3 * GAP) for number in range(len(sides))]
    pitch = lefts[-1] + half + BETWEEN
    heights = [row_height * -(-max(map(len, block.rows)) // columns) for block in blocks]
    across = min(-(-sum(heights) // PAGE), max((PAGE + BETWEEN) // pitch, 1), len(blocks))
    bands = [range(len(blocks))[start : start + across] for start in range(0, len(blocks), across)]
    tops = list(accumulate((max(heights[i] for i in band) for band in bands), initial=TOP + HEADING * (len(sides) > 1)))
    sheet = Sheet(max(2 * MARGIN + across * pitch - BETWEEN, MIN_WIDTH), tops[-1] + MARGIN - GAP, *titles)
    if len(sides) > 1:
        for x in range(MARGIN, MARGIN + across * pitch, pitch):
            for left, side in zip(lefts, sides, strict=True):
                _heading(sheet, Rectangle(x + left, tops[0] - HEADING + 4, half, HEADING), side)
    for band, y in zip(bands, tops, strict=False):
        sheet.draw.line([(MARGIN, y - 9), (sheet.image.width - MARGIN, y - 9)], fill=RULE, width=1)
        for x, i in zip(count(MARGIN, pitch), band, strict=False):
            bottom = sheet.wrapped(Rectangle(x, y, LABEL - 14, heights[i] - BELOW), blocks[i].prompt, TEXT_SIZE)
            sheet.text(x, bottom + 2, blocks[i].means, SMALL_SIZE, blocks[i].colour)
            for left, side, rows in zip(lefts, sides, blocks[i].rows, strict=True):
                _draw(sheet, side, rows, (x + left, y), grid)
    return sheet.image


def _widest(sides: Sequence[Side]) -> Tiles:
    return max((side.tiles for side in sides), key=lambda tiles: tiles.width)


def _reward_bounds(sides: Sequence[Side]) -> tuple[float, float]:
    """The range of all rewards, or (0, 1) if all lie in it."""
    rewards = [row.reward for side in sides for row in side.table.rows]
    low, high = min(rewards), max(rewards)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _draw(sheet: Sheet, side: Side, rows: Sequence[int], at: tuple[int, int], grid: Grid) -> None:
    """Draws tiles from `at` to the right, then below."""
    low, high = grid.bounds
    tiles = side.tiles
    for number, row in enumerate(rows):
        down, right = divmod(number, grid.columns)
        x, y = at[0] + right * (tiles.width + GAP), at[1] + down * grid.row_height
        sample = side.table.rows[row]
        level = (sample.reward - low) / (high - low) if high > low else 1.0
        sheet.tile(Rectangle(x, y, tiles.width, tiles.height), tiles.images[row], grid.captions(sample), level)


def _heading(sheet: Sheet, box: Rectangle, side: Side) -> None:
    """Draws the name and mean of a side, on one line if they fit."""
    text = f"mean {side.table.mean_reward:.2f}"
    if width_of(f"{side.heading}   {text}", HEAD_SIZE) <= box.width:
        sheet.text(box.x, box.y + 6, side.heading, HEAD_SIZE)
        sheet.text(box.x + box.width, box.y + 6, text, HEAD_SIZE, MUTED, anchor="ra")
    else:
        sheet.text(box.x, box.y - 6, side.heading, SMALL_SIZE)
        sheet.text(box.x, box.y + 11, text, SMALL_SIZE, MUTED)


def _about(table: SampleTable[TiledMedia], tiles: Tiles) -> str:
    rewrites = "below each reward: the rewrite that was drawn"
    has_rewrites = any(REWRITE in row.facts for row in table.rows)
    return "".join(f"; {text}" for text in (tiles.about, rewrites if has_rewrites else "", table.remark) if text)


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


def saved(sheet: Image.Image, path: Path) -> Path:
    """Saves the sheet and returns the path."""
    sheet.save(path)
    return path
