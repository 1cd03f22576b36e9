"""Settings, facts and segments of images as tokens."""

from __future__ import annotations

import pytest
import torch

from unirl.types.facts import ImageTokenFacts, LanguageFacts
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, ImageTokenSamplingParams
from unirl.types.segments import ImageTokenSegment

TEXT = {
    "family": "toy",
    "block_class_names": ("Block",),
    "lora_targets": ("q",),
    "vocab_size": 64,
    "hidden_size": 8,
    "context_length": 40,
    "cache_width": 2**24,
}
FACTS = ImageTokenFacts(**TEXT, image_size=32, num_image_tokens=16)  # type: ignore[arg-type]
SMALL = {"max_new_tokens": 16, "height": 32, "width": 32, "max_prompt_tokens": 24}


def params(**changes: object) -> ImageTokenSamplingParams:
    return ImageTokenSamplingParams(**(SMALL | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"guidance_scale": -0.5}, r"sampling\.guidance_scale must be >= 0, got -0\.5; 1 turns guidance off"),
        ({"guidance_scale": float("inf")}, r"sampling\.guidance_scale must be >= 0"),
        ({"height": 0}, r"sampling\.height must be >= 1, got 0"),
        ({"stop": ("a",)}, r"sampling\.stop must be left out"),
        ({"min_new_tokens": 2}, r"sampling\.min_new_tokens must be left out"),
        ({"temperature": -1.0}, r"sampling\.temperature must be >= 0"),
    ],
)
def test_illegal_values_are_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        params(**change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"height": 64}, r"height=64, width=32: toy draws images of 32 x 32 pixels alone\. Use sampling\.height=32"),
        ({"max_new_tokens": 15}, r"max_new_tokens=15: an image of toy has 16 tokens\. Use sampling\.max_new_tokens=16"),
        ({"max_prompt_tokens": 25}, r"is more than the context of toy, 40 tokens"),
    ],
)
def test_a_model_refuses_images_that_it_cannot_draw(change: dict[str, object], said: str) -> None:
    FACTS.check(params())
    with pytest.raises(ValueError, match=said):
        FACTS.check(params(**change))


def test_another_size_of_the_data_is_checked_as_that_of_the_settings() -> None:
    with pytest.raises(ValueError, match="height=64, width=32"):
        FACTS.check(params().at_size(64, 32))


def test_settings_of_texts_and_of_images_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"Write sampling\._target_=unirl\.types\.sampling\.ImageTokenSamplingParams"):
        FACTS.check(ARSamplingParams())
    with pytest.raises(ValueError, match=r"samples texts.*Write sampling\._target_=unirl\.types\.sampling\.ARSampl"):
        LanguageFacts(**TEXT).check(params())  # type: ignore[arg-type]


def test_guidance_takes_a_second_row_and_half_of_the_slots() -> None:
    assert params().rows_per_sample == 1 and params(guidance_scale=0.0).rows_per_sample == 2
    assert 2 * FACTS.rows_at_once(params(guidance_scale=3.0), 2) == FACTS.rows_at_once(params(), 2)
    assert params().describe() == "prompts of at most 24 tokens, images of 16 tokens at 32 x 32"


def test_an_evaluation_may_change_guidance_and_temperature() -> None:
    settings = params().for_evaluation({"guidance_scale": 2.0, "temperature": 0.0, "samples_per_prompt": 3})
    assert settings == params(guidance_scale=2.0, temperature=0.0, samples_per_prompt=3)
    assert not set(ImageTokenSamplingParams.evaluation_keys) & set(DiffusionSamplingParams.evaluation_keys) - {
        "guidance_scale"
    }


def segment(scale: float) -> ImageTokenSegment:
    return ImageTokenSegment(
        tokens=torch.zeros(6, dtype=torch.int64),
        logp=torch.zeros(6),
        loss_mask=torch.ones(6, dtype=torch.bool),
        offsets=torch.tensor([0, 3, 6]),
        finished=torch.ones(2, dtype=torch.bool),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        anchors={},
        guidance_scale=scale,
    )


def test_images_of_different_guidance_are_not_joined() -> None:
    assert ImageTokenSegment.concat(segment(2.0).chunk(1)).guidance_scale == 2.0
    with pytest.raises(ValueError, match="guidance_scale"):
        ImageTokenSegment.concat([segment(1.0), segment(2.0)])


def test_both_branches_cost_tokens() -> None:
    assert [segment(scale).costs().tolist() for scale in (1.0, 2.0)] == [[3, 3], [6, 6]]  # type: ignore[union-attr]
