"""On a GPU, the network reads no more text tokens than the prompts of a request have. The padding has no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES, FamilyCase, built
from unirl.models.chunks import select_conditions, text_multiple
from unirl.models.denoising.embeddings import ConditionImages
from unirl.testing import family
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

MASKED = ("qwen_image", "qwen_image_edit", "hunyuan_video", "hunyuan_video15", "lumina2", "z_image")
LENGTHS = {"lumina2": 63}
TEXTS = ('a sign "open"', "x", "", "two blue squares on the left")
masked = pytest.mark.parametrize("case", [case for case in CASES if case.name in MASKED], ids=lambda case: case.name)


class Recorded:
    """The denoiser of a pipeline, whose calls are recorded as (number of rows, text tokens)."""

    def __init__(self, denoiser: Any) -> None:
        self.denoiser = denoiser
        self.shapes: list[tuple[int, int]] = []

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition)
        self.shapes.append((len(x), text.embeds.shape[1]))
        velocity: Tensor = self.denoiser.velocity(x, sigma, conditions)
        return velocity


def params_of(case: FamilyCase) -> DiffusionSamplingParams:
    return family.euler(case.sizes[0], case.scales[-1], LENGTHS.get(case.name, 96))


def conditions_of(case: FamilyCase, texts: tuple[str, ...] = TEXTS, multiple: int | None = 16) -> Conditions:
    """The conditions of `texts` as on a device with this multiple."""
    pipeline, params = built(case), params_of(case)
    image = ConditionImages.of(torch.full((1, 3, params.height, params.width), 0.5))
    with pytest.MonkeyPatch.context() as patch:
        if pipeline.facts.text_is_masked:
            patch.setattr(pipeline.embed, "text_multiple", multiple)
        return pipeline.encode(texts, params, [image] * len(texts) if pipeline.facts.condition_images[0] else None)


@torch.no_grad()
def velocity(case: FamilyCase, conditions: Conditions, rows: list[int]) -> tuple[Tensor, list[tuple[int, int]]]:
    pipeline, params = built(case), params_of(case)
    shape = (len(TEXTS), *pipeline.facts.latent_shape(params))
    x, sigma = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.linspace(0.3, 0.9, len(TEXTS))
    stage, recorded = pipeline.bundle.stage(), Recorded(pipeline.stage.denoiser)
    stage.denoiser = recorded
    guidance = pipeline.facts.guidance_of(params)
    return stage.velocity(x[rows], sigma[rows], select_conditions(conditions, rows), guidance), recorded.shapes


def test_lengths_are_rounded_up_on_a_gpu_and_left_alone_on_a_cpu() -> None:
    assert text_multiple(torch.device("cuda")) == 64
    assert text_multiple(torch.device("cpu")) is None


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in MASKED], ids=lambda case: case.name)
def test_a_network_that_reads_the_padding_keeps_it(case: FamilyCase) -> None:
    bundle_class, _ = case.classes()
    assert not bundle_class.facts_of(case.path).text_is_masked


@masked
def test_the_texts_of_a_request_are_cut_to_its_longest_one(case: FamilyCase) -> None:
    text = conditions_of(case)["text"]
    assert isinstance(text, TextEmbedCondition) and text.mask is not None and text.lengths is not None
    longest = int(text.mask.sum(1).max())
    [(length, length_2)] = set(text.lengths)
    assert length == -(-longest // 16) * 16 < text.embeds.shape[1]
    assert not text.mask[:, length:].any()
    assert text.mask_2 is None or text.mask_2[:, :length_2].sum() == text.mask_2.sum() > 0


@masked
def test_the_padding_has_no_effect_and_neither_have_other_rows_of_a_request(case: FamilyCase) -> None:
    conditions = conditions_of(case)
    cut, shapes = velocity(case, conditions, [0, 1, 2, 3])
    whole, whole_shapes = velocity(case, conditions_of(case, multiple=None), [0, 1, 2, 3])
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)
    assert shapes[0][0] == whole_shapes[0][0] and shapes[0][1] < whole_shapes[0][1]
    for rows in ([1], [3, 1], [2, 0, 1]):
        alone, row_shapes = velocity(case, conditions, rows)
        assert torch.equal(alone, cut[rows])
        assert row_shapes[0][1] == shapes[0][1]
