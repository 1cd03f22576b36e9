"""Drawings, captions and prompt files for the small models of the quick start and its variants.

python scripts/quickstart_tasks.py --out datasets      # datasets/{shapes,letters}/{train,eval}.jsonl, in a second
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from scripts.lettering import FONTS, Ink
from unirl.reward.local.shapes import GROUND, PALETTE, SHAPES, coverage

SIZE = 24
"""Pixels along a side."""

Drawing = tuple[str, ...]
"""One value per attribute."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Drawings with a few attributes, and captions that name them."""

    attributes: Mapping[str, Sequence[str]]
    """The values that each attribute may have."""
    captions: tuple[str, ...]
    """Templates of captions. Prompt files use the first one."""
    max_tokens: int
    """Length of the longest caption in tokens, with its begin and end tokens."""
    wrong: float
    """Probability that a caption in pretraining names one attribute that the image does not have."""
    held_out: frozenset[Drawing]
    """Drawings that only the evaluation prompts ask for."""
    draw: Callable[[Drawing, int, np.random.Generator], np.ndarray]
    """Draws a random image [3, size, size] in [0, 1] of a drawing."""
    metadata: Callable[[Drawing], dict[str, str]]
    """Returns the metadata of a drawing in a prompt file."""

    @property
    def drawings(self) -> list[Drawing]:
        """All combinations of attributes."""
        return list(itertools.product(*self.attributes.values()))

    @property
    def shown(self) -> list[Drawing]:
        """The drawings that training prompts ask for."""
        return [drawing for drawing in self.drawings if drawing not in self.held_out]

    def caption(self, drawing: Drawing, style: int = 0) -> str:
        """Returns the caption of a drawing in the wording with the number `style`."""
        return self.captions[style].format(**dict(zip(self.attributes, drawing, strict=True)))

    def noisy_caption(self, drawing: Drawing, wrong: float, rng: np.random.Generator) -> str:
        """Returns a caption in a random wording. With probability `wrong`, one of its attributes is wrong."""
        attributes = list(drawing)
        if rng.random() < wrong:
            axis = int(rng.random() * len(drawing))
            others = [value for value in list(self.attributes.values())[axis] if value != drawing[axis]]
            attributes[axis] = others[int(rng.integers(len(others)))]
        return self.caption(tuple(attributes), int(rng.integers(len(self.captions))))

    def write_prompts(self, folder: Path) -> None:
        """Writes train.jsonl and eval.jsonl, one prompt with its metadata per line."""
        folder.mkdir(parents=True, exist_ok=True)
        held_out = [drawing for drawing in self.drawings if drawing in self.held_out]
        for name, drawings in (("train", self.shown), ("eval", held_out)):
            rows = [{"prompt": self.caption(drawing), "metadata": self.metadata(drawing)} for drawing in drawings]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# Coloured shapes


def draw_shape(drawing: Drawing, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a flat, anti-aliased shape on a dark ground. Its place, size and color vary a little."""
    color, shape = drawing
    center = (0.5 + rng.uniform(-0.08, 0.08, 2)) * size
    half = size * rng.uniform(0.26, 0.36)
    cover = coverage(shape, size, (center[0], center[1]), (half, half))
    paint = np.clip(np.array(PALETTE[color]) + rng.normal(0, 0.02, 3), 0, 1)
    return painted(cover, paint, np.array(GROUND))


def painted(cover: np.ndarray, paint: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """Returns an image [3, H, W]: the color `paint` [3] over `ground` [3] with the coverage `cover` [H, W]."""
    return (ground[:, None, None] + (paint - ground)[:, None, None] * cover).astype(np.float32)


COLORED_SHAPES = Task(
    attributes={"color": list(PALETTE), "shape": list(SHAPES)},
    captions=("a {color} {shape}", "draw a {color} {shape}", "{color} {shape}", "a picture of a {color} {shape}"),
    max_tokens=8,
    wrong=0.5,
    # A quarter of the combinations. Every color occurs once, and every shape at least once.
    held_out=frozenset(zip(PALETTE, itertools.cycle(SHAPES), strict=False)),
    draw=draw_shape,
    metadata=lambda drawing: {"color": drawing[0], "shape": drawing[1]},
)

# Two letters

LETTERS = "ACEHKLNRTX"
FONT = "plain"
INKS = ((0.10, 0.18, 0.55), (0.60, 0.08, 0.10), (0.05, 0.35, 0.15), (0.38, 0.10, 0.45))
PAPER = (0.95, 0.94, 0.90)
FINER = 8
"""Letters are drawn this many times larger and then scaled down."""


def draw_letters(drawing: Drawing, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws two dark letters on light paper. Their color, place and size vary a little."""
    from PIL import Image

    ink = written("".join(drawing), size * FINER)
    height, width = ink.shape
    scale = size * FINER * min(rng.uniform(0.56, 0.64) / height, rng.uniform(0.84, 0.92) / width)
    small = Image.fromarray(ink).resize((round(width * scale), round(height * scale)), Image.Resampling.BOX)
    page = Image.new("L", (size * FINER, size * FINER))
    shift = rng.uniform(-0.03, 0.03, 2) * size * FINER
    page.paste(small, tuple(round((page.width - side) / 2 + by) for side, by in zip(small.size, shift, strict=True)))
    cover = np.asarray(page, dtype=np.float64).reshape(size, FINER, size, FINER).mean(axis=(1, 3)) / 255
    paint = np.clip(np.array(INKS[rng.integers(len(INKS))]) + rng.normal(0, 0.02, 3), 0, 1)
    return painted(cover, paint, np.array(PAPER))


@cache
def written(text: str, height: int) -> Ink:
    """Returns the drawn text without a margin."""
    ink = FONTS[FONT](text, height)
    rows, columns = np.flatnonzero(ink.max(axis=1)), np.flatnonzero(ink.max(axis=0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


TWO_LETTERS = Task(
    attributes={"first": LETTERS, "second": LETTERS},
    captions=(
        'a sign that says "{first}{second}"',
        'the letters "{first}{second}"',
        '"{first}{second}"',
        'write "{first}{second}"',
    ),
    max_tokens=10,
    wrong=0.8,
    # A fifth of the combinations. Every letter occurs twice as the first and twice as the second.
    held_out=frozenset(
        (LETTERS[i], LETTERS[(i + step) % len(LETTERS)]) for i in range(len(LETTERS)) for step in (3, 6)
    ),
    draw=draw_letters,
    metadata=lambda drawing: {"text": "".join(drawing)},
)

TASKS = {"shapes": COLORED_SHAPES, "letters": TWO_LETTERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the data sets")
    out = parser.parse_args().out
    for name, task in TASKS.items():
        task.write_prompts(out / name)


if __name__ == "__main__":
    main()
