"""Draws four small images with prompts for them: each is the first frame of a video, or an image to edit.

    python scripts/draw_first_frames.py --out datasets/first_frames      # a second

Two images are wide, one is tall and one is square, so that a run with several sizes uses all of them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from unirl.reward.local.shapes import GROUND, PALETTE, coverage

LONG, SHORT, SQUARE = 96, 64, 80
"""Pixels along a side."""


@dataclass(frozen=True)
class Frame:
    """An image with a shape, and the color that its prompt asks for."""

    kind: str
    color: str
    wanted: str
    """The color that the shape should have after the edit, or at the end of the video."""
    height: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.color}-{self.kind}.png"

    def line(self) -> str:
        """A line of the prompt file. Its metadata are those of the shapes reward."""
        ref = {"modality": "image", "role": "condition", "uri": self.name}
        wanted = {"color": self.wanted, "shape": self.kind}
        prompt = f"the {self.color} {self.kind} turns {self.wanted}"
        return json.dumps({"prompt": prompt, "metadata": wanted, "media_refs": [ref]}) + "\n"

    def draw(self) -> np.ndarray:
        """Returns [height, width, 3] in uint8. The shape is centered and as wide as two thirds of the shorter side."""
        side = min(self.height, self.width)
        cover = coverage(self.kind, side, (side / 2, side / 2), (side / 3, side / 3))[..., None]
        pixels = np.ones((self.height, self.width, 3)) * np.array(GROUND)
        top, left = (self.height - side) // 2, (self.width - side) // 2
        region = pixels[top : top + side, left : left + side]
        region += cover * (np.array(PALETTE[self.color]) - region)
        return np.round(pixels * 255).astype(np.uint8)


FRAMES = (
    Frame("circle", "red", "blue", SHORT, LONG),
    Frame("square", "green", "yellow", SHORT, LONG),
    Frame("triangle", "blue", "red", LONG, SHORT),
    Frame("cross", "yellow", "green", SQUARE, SQUARE),
)


def write(folder: Path) -> None:
    """Writes train.jsonl and the images that it names."""
    folder.mkdir(parents=True, exist_ok=True)
    for frame in FRAMES:
        Image.fromarray(frame.draw()).save(folder / frame.name, optimize=True)
    (folder / "train.jsonl").write_text("".join(frame.line() for frame in FRAMES))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the data set")
    write(parser.parse_args().out)
