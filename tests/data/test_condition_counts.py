"""A prompt must have as many images as its model takes. This is checked before a model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from unirl.config.errors import DataError
from unirl.data.datasets import load_prompts
from unirl.data.images import check_counts
from unirl.testing.toy import toy_facts
from unirl.types.facts import LanguageFacts, ModelFacts


def file_of(folder: Path, *counts: int) -> Path:
    """A prompt file whose lines bring so many images."""
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    ref = {"modality": "image", "role": "condition", "uri": "a.png"}
    rows = [{"prompt": f"{count} pictures", "media_refs": [ref] * count} for count in counts]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "p.jsonl"


def taking(fewest: int, most: int) -> ModelFacts:
    return replace(toy_facts(), condition_images=(fewest, most))


def language(reads_images: bool) -> LanguageFacts:
    return LanguageFacts(
        family="reader",
        block_class_names=(),
        lora_targets=(),
        vocab_size=1,
        hidden_size=1,
        context_length=1,
        condition_images=(0, None if reads_images else 0),
    )


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        (taking(0, 0), [2, 3, 4]),
        (taking(1, 1), [1, 3, 4]),
        (taking(1, 2), [1, 4]),
        (taking(0, 1), [3, 4]),
        (language(reads_images=False), [2, 3, 4]),
        (language(reads_images=True), []),
    ],
)
def test_prompts_are_refused_by_line_where_a_model_takes_another_number(facts, refused, tmp_path) -> None:
    result = []
    for prompt in load_prompts(file_of(tmp_path, 0, 1, 2, 3)):
        try:
            check_counts([prompt], facts)
        except DataError as problem:
            result.append(str(problem))
    assert [int(why.split("p.jsonl:")[1].split(":")[0]) for why in result] == refused
    assert all(facts.family in why for why in result)


@pytest.mark.parametrize(
    ("facts", "count", "parts"),
    [
        (taking(0, 0), 1, ["has 1 image of", "toy is conditioned on text alone", "Remove media_refs"]),
        (
            taking(1, 1),
            0,
            ["no images of role 'condition'", "toy takes 1 image per prompt", 'Add "media_refs"'],
        ),
        (taking(1, 3), 0, ["has no images", "takes 1 to 3 per prompt", '"role": "condition"']),
        (taking(1, 1), 3, ["has 3 images", "takes 1 image per prompt", "Remove 2 from its media_refs"]),
        (taking(2, 3), 4, ["has 4 images", "takes 2 to 3 per prompt", "Remove 1 from"]),
    ],
)
def test_the_message_names_prompt_count_model_and_way_out(facts, count, parts, tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        check_counts(load_prompts(file_of(tmp_path, count)), facts)
    for part in ("p.jsonl:1: prompt 'p.jsonl:0'", *parts):
        assert part in str(caught.value)
