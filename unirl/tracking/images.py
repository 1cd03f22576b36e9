"""Samples that are pictures: files of their own, contact sheets, before/after sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import Tensor

from unirl.tracking.mirrors import Mirrors, Preview
from unirl.tracking.samples import Entry, Media, MirroredPage, SampleRow, SampleTable, Sides
from unirl.tracking.sheets import Tiles, before_after_sheet, contact_sheet, saved, tile_size

LOSSLESS_UP_TO = 160
"""Pictures with no side longer than this are kept exactly; larger ones as good WebP."""
SIDE = 128
"""Smaller pictures are enlarged to about this many pixels on a grid."""
MAX_PREVIEWS = 8
"""Pictures of one step that are mirrored one by one, beside the contact sheet."""


@dataclass(frozen=True)
class PictureMedia:
    """Pictures of one size."""

    images: np.ndarray  # [B, H, W, 3] uint8
    kind: ClassVar[str] = "picture"

    def __post_init__(self) -> None:
        assert self.images.dtype == np.uint8 and self.images.ndim == 4 and self.images.shape[3] == 3

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> PictureMedia:
        """The pictures in the files that the rows name."""
        pictures = []
        for row in rows:
            with Image.open(folder / row.file, formats=["WEBP"]) as picture:
                pictures.append(np.asarray(picture.convert("RGB")))
        return cls(np.stack(pictures))

    def write(self, names: Sequence[str], folder: Path) -> list[Entry]:
        """A WebP file for each."""
        lossless = max(self.images.shape[1:3]) <= LOSSLESS_UP_TO
        for name, picture in zip(names, self.images, strict=True):
            Image.fromarray(picture).save(folder / f"{name}.webp", lossless=lossless, quality=90, method=0)
        return [Entry(file=f"{name}.webp") for name in names]

    def compares_with(self, other: Media) -> bool:
        """Pictures of the same size."""
        return isinstance(other, PictureMedia) and self.images.shape[1:] == other.images.shape[1:]

    def tiles(self) -> Tiles:
        """Each picture by itself."""
        return Tiles(list(self.images), *tile_size(self.images))

    def page(self, table: SampleTable[Any], folder: Path, title: str) -> Path:
        return saved(contact_sheet(table, title), folder / "contact_sheet.png")

    def comparison(self, before: SampleTable[Any], after: SampleTable[Any], sides: Sides, folder: Path) -> Path:
        sheet = before_after_sheet(before, after, sides, "before and after training")
        return saved(sheet, folder / "before_after.png")

    def album(self, prompts: Sequence[str], folder: Path) -> Path:
        """Every picture as PNG, and a grid with a row per prompt."""
        pictures = [Image.fromarray(picture) for picture in self.images]
        columns = len(pictures) // len(prompts)
        for i, picture in enumerate(pictures):
            picture.save(folder / f"p{i // columns:02d}-s{i % columns:02d}.png")
        return saved(grid(pictures, columns), folder / "grid.png")

    def lines(self) -> list[str]:
        """Nothing: a console shows no pictures."""
        return []

    def remarks(self) -> list[str]:
        return []

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """The page, and the first pictures by themselves."""
        files = [(page.path.parent / row.file, f"{row.reward:.3f}  {row.prompt}") for row in rows[:MAX_PREVIEWS]]
        previews = [Preview(path, caption) for path, caption in [(page.path, page.title), *files]]
        mirrors.images(page.step, page.key, previews)


def pixels(images: Tensor) -> np.ndarray:
    """[B, H, W, 3] uint8 of images [B, 3, H, W], uint8 or float in [0, 1]."""
    levels = images if not images.is_floating_point() else (images.clamp(0, 1) * 255).round()
    return levels.byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()


def grid(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """The pictures, which are of one size, row by row; small ones enlarged."""
    scale = max(1, SIDE // max(pictures[0].size))
    width, height = (side * scale for side in pictures[0].size)
    grid = Image.new("RGB", (columns * width, -(-len(pictures) // columns) * height))
    for i, picture in enumerate(pictures):
        tile = picture.resize((width, height), Image.Resampling.NEAREST)
        grid.paste(tile, (i % columns * width, i // columns * height))
    return grid
