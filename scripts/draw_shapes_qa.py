"""Draws images of colored shapes and writes questions about them with their right answers.

    python scripts/draw_shapes_qa.py --out datasets/shapes_qa      # a few seconds

An image has one to four shapes on a grid of three by three places, all different in color or kind. Each image has four
questions: about a color, a kind, a number and a place, with four choices or for a short answer. Every choice is a keyed
hash, so that the data set is the same on every machine. No scene of a test image is in a training image.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from write_prompt_sets import between, keyed, pick, some

from unirl.reward.local.shapes import GROUND, PALETTE, SHAPES, coverage

SIZE = 96
"""Pixels along a side."""
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
PICTURES = {"train": 160, "test": 40}
TEST_SHARE = 5
"""One of this many scenes is in the test split."""
LETTERS = "ABCD"
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}


@dataclass(frozen=True, order=True)
class Thing:
    """One shape of an image. The split of a scene hashes the repr of its things, so this name must not change."""

    color: str
    kind: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


Scene = tuple[Thing, ...]


@dataclass(frozen=True)
class Question:
    """A question about an image."""

    prompt: str
    answer: str
    """The exact right answer: a letter, or one or two words."""
    about: str
    """color, kind, number or place."""
    form: str
    """choice or short."""


# Scenes


def scene(*key: object) -> Scene:
    """Returns the scene of a key, in the order of its places."""
    number = between(1, 4, "number", *key)
    names = some([(color, kind) for color in PALETTE for kind in SHAPES], number, "names", *key)
    places = sorted(some(range(len(PLACES)), number, "places", *key))
    return tuple(Thing(color, kind, PLACES[place]) for (color, kind), place in zip(names, places, strict=True))


def is_held_out(shown: Scene) -> bool:
    """Returns True if the scene belongs to the test split."""
    return keyed("split", sorted(shown)) % TEST_SHARE == 0


def draw(shown: Scene, size: int, *key: object) -> np.ndarray:
    """Returns an image [size, size, 3] in uint8 with flat, anti-aliased shapes, which vary a little with the key.

    `size` is a multiple of 3. Every shape stays within its own cell of the grid.
    """
    pixels = np.ones((size, size, 3)) * np.array(GROUND)
    cell = size // 3
    for thing in shown:
        row, column = divmod(PLACES.index(thing.place), 3)
        center = [(0.5 + between(-60, 60, axis, thing.name, *key) / 1000) * cell for axis in "xy"]
        half = cell * between(280, 380, "half", thing.name, *key) / 1000
        cover = coverage(thing.kind, cell, (center[0], center[1]), (half, half))[..., None]
        region = pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
        region += cover * (np.array(PALETTE[thing.color]) - region)
    return np.round(pixels * 255).astype(np.uint8)


# Questions


def questions(shown: Scene, *key: object) -> list[Question]:
    """Returns one question about each of a color, a kind, a number and a place."""
    makers = (about_color, about_kind, about_number, about_place)
    return [worded(*make(shown, *key), make.__name__.removeprefix("about_"), *key) for make in makers]


BareQuestion = tuple[str, str, list[str]]
"""A question, its answer, and all possible answers to such a question."""


def about_color(shown: Scene, *key: object) -> BareQuestion:
    thing = pick(shown, "color of", *key)
    alone = sum(other.kind == thing.kind for other in shown) == 1
    which = f"the {thing.kind}" if alone else f"the shape at the {thing.place}"
    return f"What color is {which}?", thing.color, list(PALETTE)


def about_kind(shown: Scene, *key: object) -> BareQuestion:
    thing = pick(shown, "kind of", *key)
    alone = sum(other.color == thing.color for other in shown) == 1
    which = f"is {thing.color}" if alone else f"is at the {thing.place}"
    return f"Which shape {which}?", thing.kind, list(SHAPES)


def about_number(shown: Scene, *key: object) -> BareQuestion:
    thing = pick(shown, "number of", *key)
    counted = {
        "shapes": len(shown),
        f"{thing.color} shapes": sum(other.color == thing.color for other in shown),
        PLURALS[thing.kind]: sum(other.kind == thing.kind for other in shown),
    }
    what = pick(list(counted), "counted", *key)
    return f"How many {what} are there?", str(counted[what]), ["1", "2", "3", "4"]


def about_place(shown: Scene, *key: object) -> BareQuestion:
    thing = pick(shown, "place of", *key)
    return f"Where is the {thing.name}?", thing.place, list(PLACES)


SHORT = {
    "color": "Answer in one word.",
    "kind": "Answer in one word.",
    "number": "Answer with a number.",
    "place": "Answer in one or two words.",
}


def worded(question: str, answer: str, answers: list[str], about: str, *key: object) -> Question:
    """Returns the question with four choices, or with an instruction for a short answer."""
    if keyed("form", about, *key) % 2:
        return Question(f"{question}\n{SHORT[about]}", answer, about, "short")
    others = some([other for other in answers if other != answer], len(LETTERS) - 1, "others", about, *key)
    choices = some([answer, *others], len(LETTERS), "order", about, *key)
    listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    letter = LETTERS[choices.index(answer)]
    return Question(f"{question}{listed}\nAnswer with the letter.", letter, about, "choice")


# Files


def scenes(split: str) -> Iterator[tuple[int, Scene]]:
    """Yields the different scenes of a split, each with the number in its key."""
    seen: set[Scene] = set()
    for number in count():
        shown = scene(number)
        if is_held_out(shown) is (split == "test") and shown not in seen:
            seen.add(shown)
            yield number, shown
        if len(seen) == PICTURES[split]:
            return


def write(folder: Path) -> None:
    """Writes pictures/*.png, {train,test}.jsonl, and files with the questions of one form alone."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for split in PICTURES:
        lines: dict[str, list[str]] = {"choice": [], "short": []}
        both = []
        for index, (number, shown) in enumerate(scenes(split)):
            uri = f"pictures/{split}-{index:03d}.png"
            Image.fromarray(draw(shown, SIZE, number)).save(folder / uri, optimize=True)
            asked = questions(shown, number)
            both += [line_of(question, uri) for question in asked]
            for question in asked:
                lines[question.form].append(line_of(question, uri))
        (folder / f"{split}.jsonl").write_text("".join(both), encoding="utf-8")
        (folder / f"{split}_choices.jsonl").write_text("".join(lines["choice"]), encoding="utf-8")
        (folder / f"{split}_short.jsonl").write_text("".join(lines["short"]), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(both)} questions about {PICTURES[split]} pictures")


def line_of(question: Question, uri: str) -> str:
    metadata = {"answer": question.answer, "about": question.about, "form": question.form}
    media = [{"modality": "image", "role": "condition", "uri": uri}]
    return json.dumps({"prompt": question.prompt, "metadata": metadata, "media_refs": media}) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
