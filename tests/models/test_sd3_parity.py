"""SD3Pipeline gives the embeddings, trajectories and images of diffusers."""

from __future__ import annotations

import pytest
import torch

from tests.models.rollouts import PROMPTS, sampling
from unirl.models.denoising.diffusers_pipeline import difference, plain_pipeline
from unirl.models.sd3.family import SD3Pipeline
from unirl.types.conditions import TextEmbedCondition


@pytest.mark.parametrize("length", [16, 40])
def test_embeddings_are_those_of_diffusers(toy: SD3Pipeline, length: int) -> None:
    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    with torch.no_grad():
        embeds, _, pooled, _ = plain.encode_prompt(
            list(PROMPTS), None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        ours = toy.bundle.text_encoder().encode(PROMPTS, length)
    assert torch.equal(ours.embeds, embeds)
    assert torch.equal(ours.pooled, pooled)


def test_a_model_without_t5_gets_zeros_instead_as_in_diffusers(toy: SD3Pipeline) -> None:
    from unirl.models.sd3.family import SD3TextEncoder

    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    plain.text_encoder_3 = None
    modules = {name: module for name, module in toy.bundle.modules.items() if name != "text_encoder_3"}
    with torch.no_grad():
        embeds, *_ = plain.encode_prompt(list(PROMPTS), None, None, do_classifier_free_guidance=False)
        ours = SD3TextEncoder(modules, toy.bundle.tokenizers, 96).encode(PROMPTS, 256)
    assert torch.equal(ours.embeds, embeds)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_images_are_those_of_diffusers_on_the_same_noise(toy: SD3Pipeline, guidance_scale: float) -> None:
    assert difference(toy, _fresh(toy), PROMPTS, sampling(toy, guidance_scale=guidance_scale)) < 1e-5


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_latents_of_a_pixel_model_are_those_of_diffusers(pixel: SD3Pipeline, guidance_scale: float) -> None:
    params = sampling(pixel, height=16, width=16, guidance_scale=guidance_scale)
    assert difference(pixel, _fresh(pixel), PROMPTS, params) < 1e-5


def test_the_comparison_detects_a_change_of_one_weight(toy: SD3Pipeline) -> None:
    transformer = toy.bundle.untrained()
    with torch.no_grad():
        transformer.proj_out.bias += 0.1
    assert difference(toy, plain_pipeline(toy.bundle, transformer), PROMPTS, sampling(toy)) > 1e-3


def test_a_pixel_model_reads_one_encoder_and_no_t5_tokens(pixel: SD3Pipeline) -> None:
    condition = pixel.encode(PROMPTS, sampling(pixel, height=16, width=16))["text"]
    assert isinstance(condition, TextEmbedCondition) and condition.pooled is not None
    assert condition.embeds.shape == (3, 77, 32)
    assert condition.pooled.shape == (3, 32)


def _fresh(pipeline: SD3Pipeline):  # type: ignore[no-untyped-def]
    return plain_pipeline(pipeline.bundle, pipeline.bundle.untrained())
