"""The shipped questions about shapes: right by what the pictures show, without overlap, and drawn anew to the pixel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.source_tree import ROOT
from unirl.data.data_source import MultimodalRLDataSource
from unirl.reward.local.shapes import GROUND, ShapesSpec, sight

SHIPPED = ROOT / "datasets" / "shapes_qa"
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
FILES = tuple(f"{split}{form}.jsonl" for split in ("train", "test") for form in ("", "_choices", "_short"))
Seen = tuple[tuple[str, str, str], ...]


@pytest.fixture(scope="module")
def data() -> MultimodalRLDataSource:
    return MultimodalRLDataSource(data_path=str(SHIPPED / "train.jsonl"), eval_data_path=str(SHIPPED / "test.jsonl"))


def seen(path: str) -> Seen:
    """(color, kind, place) of every shape, by the detector of the drawing quick start, one ninth at a time."""
    pixels = np.asarray(Image.open(path)) / 255
    cell = len(pixels) // 3
    result = []
    for place, name in enumerate(PLACES):
        row, column = divmod(place, 3)
        part = pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
        if np.abs(part - GROUND).max() > 0.05:
            what = sight(part, ShapesSpec(max_color_distance=0.1, max_area=0.9))
            result.append((str(what.color), str(what.shape), name))
    return tuple(result)


def right_answer(prompt: str, shown: Seen) -> str:
    """What a question asks for, told by what the picture shows."""
    question = prompt.split("\n")[0]

    def only(values: set[str]) -> str:
        (value,) = values
        return value

    def named(text: str) -> list[tuple[str, str, str]]:
        words = set(re.findall(r"[a-z]+", text.replace("circles", "circle").replace("squares", "square")
                               .replace("triangles", "triangle").replace("crosses", "cross")))  # fmt: skip
        colors, kinds = words & {c for c, _, _ in shown}, words & {k for _, k, _ in shown}
        place = re.search(r"at the ([a-z ]+)\?", text)
        return [
            (c, k, p)
            for c, k, p in shown
            if (not colors or c in colors) and (not kinds or k in kinds) and (place is None or p == place[1])
        ]

    match question.split()[0]:
        case "What":
            answer = only({c for c, _, _ in named(question)})
        case "Which":
            answer = only({k for _, k, _ in named(question)})
        case "How":
            answer = str(len(named(question)))
        case _:
            answer = only({p for _, _, p in named(question)})
    choices = {text: letter for letter, text in re.findall(r"^([A-D])\. (.+)$", prompt, re.MULTILINE)}
    assert not choices or len(choices) == 4
    return choices[answer] if choices else answer


def test_every_answer_is_what_the_image_shows(data) -> None:
    pictures = {path: seen(path) for prompt in (*data.prompts, *data.held_out) for path in [prompt.images[0].uri]}
    for prompt in (*data.prompts, *data.held_out):
        assert prompt.metadata["answer"] == right_answer(prompt.text, pictures[prompt.images[0].uri]), prompt


def test_no_scene_of_the_test_is_trained_on(data) -> None:
    train, test = ({seen(prompt.images[0].uri) for prompt in prompts[::4]} for prompts in (data.prompts, data.held_out))
    assert (len(train), len(test)) == (160, 40) and not train & test


def test_kinds_of_questions_and_letters_are_balanced(data) -> None:
    about = Counter(prompt.metadata["about"] for prompt in data.prompts)
    assert about == dict.fromkeys(("color", "kind", "number", "place"), 160)
    letters = Counter(p.metadata["answer"] for p in data.prompts if p.metadata["form"] == "choice")
    assert set(letters) == set("ABCD") and max(letters.values()) < 1.5 * min(letters.values())
    assert 260 < sum(letters.values()) < 380


@pytest.mark.parametrize(("form", "name"), [("choice", "choices"), ("short", "short")])
def test_questions_of_one_form_also_stand_alone(form, name) -> None:
    for split in ("train", "test"):
        lines = (SHIPPED / f"{split}.jsonl").read_text().splitlines()
        alone = (SHIPPED / f"{split}_{name}.jsonl").read_text().splitlines()
        assert alone == [line for line in lines if json.loads(line)["metadata"]["form"] == form]


@pytest.mark.slow
def test_the_script_draws_the_same_set_anew(data, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "draw_shapes_qa.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
    files = sorted(path.name for path in (SHIPPED / "pictures").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "pictures").iterdir())
    for name in files:
        one, other = (np.asarray(Image.open(folder / "pictures" / name)) for folder in (SHIPPED, tmp_path))
        assert np.array_equal(one, other), name


def test_images_are_small(data) -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*.*")) < 600_000
