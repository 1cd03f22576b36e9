"""Draws a small set of preference pairs: of each prompt a picture that shows it, and one of another color or shape.

    python scripts/draw_preference_pairs.py --out datasets/preferences      # about a minute

Which picture belongs to which prompt depends on the seed alone, so the set can be made anew at any size.
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
"""Pixels along a side: what Stable Diffusion 3 recipes ask for."""
TASK = COLORED_SHAPES
"""Its held-out colors and shapes are in no picture."""


@dataclass(frozen=True)
class Pair:
    """One line of the file."""

    prompt: str
    chosen: np.ndarray  # [3, size, size] in [0, 1]
    rejected: np.ndarray


def pairs(size: int, seed: int) -> Iterator[Pair]:
    """One pair for every drawing that may be seen."""
    rng = np.random.default_rng(seed)
    for wanted in TASK.shown:
        wrong = another(wanted, rng)
        yield Pair(TASK.caption(wanted), TASK.draw(wanted, size, rng), TASK.draw(wrong, size, rng))


def another(wanted: Drawing, rng: np.random.Generator) -> Drawing:
    """A drawing that differs in color or in shape."""
    near = [drawing for drawing in TASK.shown if sum(a != b for a, b in zip(drawing, wanted, strict=True)) == 1]
    return near[int(rng.integers(len(near)))]


def write(folder: Path, size: int, seed: int) -> None:
    """train.jsonl and the pictures that it names."""
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
