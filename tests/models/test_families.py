"""Every diffusers family gives the results of its own pipeline in diffusers: sigmas, samples, adapters and models.

The comparisons run on toy weights in float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES, FamilyCase, built
from unirl.models.denoising.bundle import MeasuringTextEncoder
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.testing import family
from unirl.testing.bundle import check_bundle, rollout_of
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

each_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def settings(case: FamilyCase, size: int = 0, scale: int = -1) -> DiffusionSamplingParams:
    return family.euler(case.sizes[size], case.scales[scale], case.max_sequence_length)


@each_family
def test_every_toy_passes_check_bundle(case: FamilyCase) -> None:
    height, width, frames = case.sizes[0]
    check_bundle(built(case), height, width, case.scales[-1], num_frames=frames)


@each_family
def test_the_sigmas_are_those_of_diffusers(case: FamilyCase) -> None:
    family.check_levels(built(case), settings(case, size=1))


@each_family
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("scale", [0, -1])
def test_the_samples_are_those_of_diffusers(case: FamilyCase, size: int, scale: int) -> None:
    family.check_samples(built(case), settings(case, size, scale))


@each_family
def test_weights_texts_and_guidance_change_the_samples(case: FamilyCase) -> None:
    family.check_sensitivity(built(case), settings(case))


# Prompts that are longer than the text encoder reads

SHORT = "a cat"
LONG = "a red circle on a blue square " * 40
"""More tokens than any encoder of a toy reads."""


def encoder_of(case: FamilyCase) -> Any:
    encoder = built(case).bundle.text_encoder()
    assert isinstance(encoder, MeasuringTextEncoder), "a text encoder has `cuts`, so that long rewrites are counted"
    return encoder


def encoded(encoder: Any, texts: list[str], length: int) -> TextEmbedCondition:
    with torch.no_grad():
        return encoder.encode(texts, length)


def tensors(condition: TextEmbedCondition, row: int) -> list[Tensor]:
    return [value[row] for value in vars(condition).values() if isinstance(value, Tensor)]


@each_family
def test_a_prompt_is_cut_if_and_only_if_its_end_has_no_effect(case: FamilyCase) -> None:
    encoder, length = encoder_of(case), 2 * case.max_sequence_length
    texts = [SHORT, f"{SHORT} and a dog", LONG, f"{LONG} and a dog"]
    assert encoder.cuts(texts, length) == [False, False, True, True]
    condition = encoded(encoder, texts, length)
    rows = [tensors(condition, row) for row in range(4)]
    assert not all(torch.equal(a, b) for a, b in zip(rows[0], rows[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows[2], rows[3], strict=True))


@each_family
def test_a_prompt_is_cut_if_it_has_one_token_more_than_the_encoder_reads(case: FamilyCase) -> None:
    """The mask of a longer sequence counts the tokens of a prompt."""
    encoder, length = encoder_of(case), 3 * case.max_sequence_length
    mask = encoded(encoder, [SHORT], length).mask
    if mask is None:
        pytest.skip("the transformer reads padding, too, so the condition has no mask")
    num_tokens = int(mask.sum())
    assert [encoder.cuts([SHORT], num_tokens + more) for more in (-1, 0, 1)] == [[True], [False], [False]]


def test_without_t5_the_prompt_of_sd3_is_cut_where_clip_cuts_it() -> None:
    [case] = [case for case in CASES if case.name == "sd3"]
    encoder = encoder_of(case)
    encoder = type(encoder)({k: v for k, v in encoder.modules.items() if k != "text_encoder_3"}, encoder.tokenizers, 96)
    words = encoder.tokenizers["tokenizer"]("a" + " a" * 200).input_ids
    assert len(words) == 203  # 201 words, a beginning and an end
    texts = ["a" + " a" * count for count in (74, 75)]
    assert encoder.cuts(texts, 8) == [False, True]


# Exports


@pytest.mark.slow
@each_family
def test_diffusers_gives_the_same_samples_with_the_exported_adapter(case: FamilyCase, tmp_path: Path) -> None:
    family.check_lora_export(case.build(), settings(case), tmp_path)


@pytest.mark.slow
@each_family
def test_diffusers_and_the_bundle_load_the_exported_model(case: FamilyCase, tmp_path: Path) -> None:
    family.check_model_export(case.build(), settings(case), tmp_path)


@each_family
def test_every_weight_that_the_output_depends_on_gets_a_gradient(case: FamilyCase) -> None:
    pipeline = case.build()
    module, generator = pipeline.bundle.trainable(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # layers that are zero at first (gates, last layers) block the gradient
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05, generator=generator)
    track = rollout_of(pipeline, replace(settings(case), kernel=FlowSDEStrategy()))
    replay = pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
    replay.velocity.square().mean().backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and bool(p.grad.any())}
    still = {name for name, _ in module.named_parameters()} - moved
    assert [name for name in sorted(still) if not name.startswith(tuple(case.without_gradient))] == []
    assert all(any(name.startswith(prefix) for name in still) for prefix in case.without_gradient)


@pytest.mark.parametrize("claim", ["levels", "samples", "adapter", "model"])
def test_the_check_detects_a_family_that_is_wrong(claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    pipeline, params = case.build(), settings(case)
    if claim == "levels":
        monkeypatch.setattr(pipeline, "facts", replace(pipeline.facts, schedule=SigmaSchedule(shift=4.0)))
        with pytest.raises(AssertionError, match=r"sigmas of facts.schedule differ by"):
            family.check_levels(pipeline, params)
    if claim == "samples":
        monkeypatch.setattr(pipeline.stage.denoiser, "timestep_scale", 999.0)
        with pytest.raises(AssertionError, match="from those of diffusers"):
            family.check_samples(pipeline, params)
    if claim == "adapter":
        monkeypatch.setattr(family, "ALPHA", 6.5)
        monkeypatch.setattr(
            pipeline,
            "write_lora",
            lambda folder, adapter: type(pipeline).write_lora(pipeline, folder, replace(adapter, alpha=6.0)),
        )
        with pytest.raises(AssertionError, match="with the exported adapter"):
            family.check_lora_export(pipeline, params, tmp_path)
    if claim == "model":

        def forgetful(tensors, folder):
            return type(pipeline).write_model(
                pipeline, {k: v for k, v in tensors.items() if "proj_out" not in k}, folder
            )

        monkeypatch.setattr(pipeline, "write_model", forgetful)
        with pytest.raises(AssertionError, match="with the exported model"):
            family.check_model_export(pipeline, params, tmp_path)
