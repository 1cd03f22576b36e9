"""Image samples: one file each, contact sheets and before/after sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from unirl.tracking.measures import image_measures
from unirl.tracking.mirrors import Mirrors, Preview
from unirl.tracking.samples import REWRITE, Gallery, Media, MirroredPage, SampleRow, SampleTable
from unirl.tracking.sheets import TiledMedia, Tiles, gallery_sheet, saved, tile_size
from unirl.tracking.tables import replace_text
from unirl.tracking.texts import listing

LOSSLESS_UP_TO = 160
"""Images with no longer side are stored lossless; larger ones as WebP of quality 90."""
MAX_PREVIEWS = 8
"""Images of one step that mirrors get in addition to the contact sheet."""


@dataclass(frozen=True)
class ImageMedia(TiledMedia):
    """Images of one size."""

    images: np.ndarray  # [B, H, W, 3] uint8
    kind: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        assert self.images.dtype == np.uint8 and self.images.ndim == 4 and self.images.shape[3] == 3

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> ImageMedia:
        """The images in the files that the rows name."""
        images = []
        for row in rows:
            with Image.open(folder / row.file, formats=["WEBP"]) as image:
                images.append(np.asarray(image.convert("RGB")))
        return cls(np.stack(images))

    def write(self, rows: Sequence[SampleRow], names: Sequence[str], folder: Path) -> list[SampleRow]:
        """Writes one WebP file per image."""
        lossless = max(self.images.shape[1:3]) <= LOSSLESS_UP_TO
        for name, image in zip(names, self.images, strict=True):
            Image.fromarray(image).save(folder / f"{name}.webp", lossless=lossless, quality=90, method=0)
        return [replace(row, file=f"{name}.webp") for row, name in zip(rows, names, strict=True)]

    def compares_with(self, other: Media) -> bool:
        """Returns True for images of the same size."""
        return isinstance(other, ImageMedia) and self.images.shape[1:] == other.images.shape[1:]

    def tiles(self) -> Tiles:
        """One tile per image."""
        return Tiles(list(self.images), *tile_size(self.images))

    def page(self, table: SampleTable[Self], folder: Path, title: str) -> Path:
        """Writes a contact sheet, and where prompts were rewritten a page with the rewrite of each image."""
        if any(REWRITE in row.facts for row in table.rows):
            text = listing(table, title, lambda row, limit: f"![]({table.rows[row].file})\n\n")
            replace_text(folder / "samples.md", text)
        return super().page(table, folder, title)

    def gallery(self, drawn: Gallery, folder: Path) -> Path:
        """Writes every image as PNG with its prompt and seed in the metadata, a manifest, and a labelled grid."""
        names = [f"{drawn.name(number)}.png" for number in range(len(self.images))]
        for number, name in enumerate(names):
            text = PngInfo()
            for key, value in drawn.of(number).items():
                text.add_text(key, str(value))
            Image.fromarray(self.images[number]).save(folder / name, pnginfo=text)
        drawn.write_manifest(folder / "manifest.jsonl", [{"file": name} for name in names])
        return saved(gallery_sheet(self.tiles(), drawn), folder / "grid.png")

    def measures(self) -> dict[str, float]:
        """The mean distance between the images, and their fine detail."""
        return image_measures(self.images)

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """Sends the page, and under a key of their own the first images: W&B shows only images of one size together."""
        mirrors.each(lambda mirror: mirror.images(page.step, page.key, [Preview(page.path, page.title)]))
        first = rows[:MAX_PREVIEWS]
        previews = [Preview(page.path.parent / row.file, f"{row.reward:.3f}  {row.prompt}") for row in first]
        mirrors.each(lambda mirror: mirror.images(page.step, f"{page.key}_images", previews))


def pixels(images: Tensor) -> np.ndarray:
    """[B, H, W, 3] uint8 of images [B, 3, H, W], uint8 or float in [0, 1]."""
    levels = images if not images.is_floating_point() else (images.clamp(0, 1) * 255).round()
    return levels.byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
