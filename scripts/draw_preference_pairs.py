"""Draws a small set of preference pairs: for each prompt a correct image, and one with another color or shape.

    python scripts/draw_preference_pairs.py --out datasets/preferences      # about a minute

The contents of the images depend only on the seed, so the same set can be drawn at any size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from quickstart_tasks import COLORED_SHAPES, Drawing

SIZE = 512
"""Pixels along a side, as in the recipes of Stable Diffusion 3."""
TASK = COLORED_SHAPES
"""No image shows a held-out combination of color and shape."""


@dataclass(frozen=True)
class Pair:
    """One line of the file."""

    prompt: str
    chosen: np.ndarray  # [3, size, size] in [0, 1]
    rejected: np.ndarray


def pairs(size: int, seed: int) -> Iterator[Pair]:
    """Yields one pair for each drawing of the training split."""
    rng = np.random.default_rng(seed)
    for wanted in TASK.shown:
        wrong = another(wanted, rng)
        yield Pair(TASK.caption(wanted), TASK.draw(wanted, size, rng), TASK.draw(wrong, size, rng))


def another(wanted: Drawing, rng: np.random.Generator) -> Drawing:
    """Returns a random drawing that differs either in color or in shape."""
    near = [drawing for drawing in TASK.shown if sum(a != b for a, b in zip(drawing, wanted, strict=True)) == 1]
    return near[int(rng.integers(len(near)))]


def write(folder: Path, size: int, seed: int) -> None:
    """Writes train.jsonl and the images that it names."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for i, pair in enumerate(pairs(size, seed)):
        refs = []
        for role, picture in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            uri = f"pictures/{i:02d}-{role}.png"
            levels = np.round(picture.transpose(1, 2, 0) * 255).astype(np.uint8)
            Image.fromarray(levels).save(folder / uri, optimize=True)
            refs.append({"modality": "image", "role": role, "uri": uri})
        lines.append(json.dumps({"prompt": pair.prompt, "media_refs": refs}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.out, options.size, options.seed)


if __name__ == "__main__":
    main()
