"""The shipped vision-language model is small and complete, and reads the images and prompts of its script."""

from __future__ import annotations

import json

import pytest
import torch

from tests.source_tree import ROOT
from unirl.models.images import read_image
from unirl.models.qwen_vl.family import QwenVLBundle, QwenVLPipeline
from unirl.models.qwen_vl.vision import IMAGE_TOKEN
from unirl.sde.noise import NoiseSource
from unirl.types.primitives import MediaRef, PromptImages, Texts
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import ARSamplingParams

DATA = ROOT / "datasets" / "shapes_qa"


@pytest.fixture(scope="module")
def pipeline() -> QwenVLPipeline:
    return QwenVLPipeline(QwenVLBundle(path="quickstart", dtype="fp32"))


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def asked(found: list[dict]) -> RolloutReq:
    ids = [f"q{i}" for i in range(len(found))]
    refs = [tuple(MediaRef("image", "condition", str(DATA / ref["uri"])) for ref in row["media_refs"]) for row in found]
    return RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=[row["prompt"] for row in found]), "images": PromptImages(per_prompt=refs)},
        metadata=[{} for _ in found],
        tracks={},
        purpose="r",
        step=0,
    )


def test_the_shipped_files_take_at_most_four_megabytes() -> None:
    folder = QwenVLBundle.shipped["quickstart"]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4_000_000


def test_every_word_of_the_short_questions_and_answers_is_one_token(pipeline) -> None:
    codec = pipeline.bundle.codec
    for row in [*rows("train_short"), *rows("test_short")]:
        words = [
            word for line in row["prompt"].split("\n") for word in line.replace("?", " ?").replace(".", " .").split()
        ]
        assert len(codec.encode(row["prompt"])) <= len(words) + row["prompt"].count("\n"), row["prompt"]
        assert len(codec.encode(row["metadata"]["answer"])) == len(row["metadata"]["answer"].split())


def test_an_image_is_nine_tokens_and_is_not_scaled(pipeline) -> None:
    result = rows("test_short")[:1]
    conditions = pipeline.encode(asked(result), ARSamplingParams(max_prompt_tokens=128))
    assert int((conditions["prompt"].tokens == IMAGE_TOKEN).sum()) == 9
    assert read_image(str(DATA / result[0]["media_refs"][0]["uri"])).size == (96, 96)
    assert conditions["images"].grids == [((1, 6, 6),)]


def test_it_answers_in_words_that_are_answers_and_is_often_wrong(pipeline) -> None:
    result = rows("train_short")[:96]
    params = ARSamplingParams(max_new_tokens=8, max_prompt_tokens=128)
    conditions = pipeline.encode(asked(result), params)
    with torch.no_grad():
        segment = pipeline.stage.sample(conditions, params, NoiseSource(0, "r", 0), [f"q{i}" for i in range(96)], 32)
    said = pipeline.decode(segment)
    answers = {row["metadata"]["answer"] for row in rows("train_short")}
    assert sum(text in answers for text in said) > 85
    right = sum(text == row["metadata"]["answer"] for text, row in zip(said, result, strict=True))
    assert 30 <= right <= 75
