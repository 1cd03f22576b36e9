"""Text, tokens, variants and sizes of FLUX.1."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.models.family_cases import changed
from unirl.config.errors import DataError
from unirl.models.denoising.diffusers_pipeline import (
    difference,
    fixed_sigmas_scheduler,
    plain_pipeline,
    sample_with_euler,
    unshifted_sigmas,
)
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.flux1.family import FLUX1, Flux1Bundle, Flux1Pipeline, facts
from unirl.models.loading.hub import quiet_libraries
from unirl.sde.kernels import EulerODE
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ("a red circle", "two blue squares on the left, and more words than are kept", "")
PARAMS = DiffusionSamplingParams(
    kernel=EulerODE(), num_inference_steps=3, height=32, width=48, guidance_scale=3.5, max_sequence_length=16
)


@pytest.fixture(scope="module")
def toy() -> Flux1Pipeline:
    return Flux1Pipeline(Flux1Bundle(path="toy", dtype="fp32"))


@pytest.fixture(scope="module")
def schnell() -> Flux1Pipeline:
    return Flux1Pipeline(Flux1Bundle(path="toy-schnell", dtype="fp32"))


@pytest.mark.parametrize("length", [16, 40])
def test_embeddings_are_those_of_diffusers(toy: Flux1Pipeline, length: int) -> None:
    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    with torch.no_grad(), quiet_libraries():
        embeds, pooled, _ = plain.encode_prompt(list(PROMPTS), None, max_sequence_length=length)
        ours = toy.bundle.text_encoder().encode(PROMPTS, length)
    assert ours.pooled is not None
    assert torch.equal(ours.embeds, embeds)
    assert torch.equal(ours.pooled, pooled)


def test_tokens_are_packed_as_in_diffusers_and_unpacked_again(toy: Flux1Pipeline) -> None:
    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    x = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(packed(x, 2), plain._pack_latents(x, 2, 4, 4, 6))
    assert torch.equal(unpacked(packed(x, 2), x.shape, 2), x)


@torch.no_grad()
def test_final_latents_are_those_of_diffusers(toy: Flux1Pipeline) -> None:
    ours = sample_with_euler(toy, PROMPTS, PARAMS)
    assert ours.params.sigmas is not None
    plain = plain_pipeline(toy.bundle, toy.bundle.untrained(), scheduler=fixed_sigmas_scheduler(ours.params.sigmas))
    with quiet_libraries():
        tokens = plain(
            list(PROMPTS),
            height=32,
            width=48,
            guidance_scale=3.5,
            num_inference_steps=3,
            sigmas=unshifted_sigmas(3),
            latents=packed(ours.x_T, 2),
            max_sequence_length=16,
            output_type="latent",
        ).images
    assert (unpacked(tokens, ours.latents.shape, 2) - ours.latents).abs().max() < 1e-5


def test_a_model_without_a_guidance_input_matches_diffusers_and_refuses_a_scale(
    schnell: Flux1Pipeline,
) -> None:
    params = dataclasses.replace(PARAMS, guidance_scale=1.0)
    plain = plain_pipeline(schnell.bundle, schnell.bundle.untrained())
    assert difference(schnell, plain, PROMPTS, params, own_schedule=True) < 1e-5
    with pytest.raises(ValueError, match=r"guidance_scale=3\.5: this model was distilled .* Use guidance_scale=1"):
        schnell.facts.check(PARAMS)


def test_a_side_must_hold_whole_tokens(toy: Flux1Pipeline) -> None:
    toy.facts.check(PARAMS)
    with pytest.raises(ValueError, match=r"sampling\.height=40 is not a positive multiple of 16 .* Use 32"):
        toy.facts.check(dataclasses.replace(PARAMS, height=40))


def test_a_transformer_with_further_inputs_is_refused() -> None:
    """FLUX.1-Fill and the control models."""
    fill = changed(FLUX1.toys["toy"], "transformer", in_channels=96)
    with pytest.raises(DataError, match=r"reads tokens of 96 numbers, .* reads 16 .* Fill") as refused:
        facts(fill, 1)
    assert refused.value.code == 4001


@pytest.mark.parametrize(
    ("name", "billions"),
    [("black-forest-labs/FLUX.1-dev", 11.90), ("black-forest-labs/FLUX.1-schnell", 11.89)],
)
def test_published_checkpoints_have_their_published_size(name: str, billions: float) -> None:
    """The files on the hub: 23.80 and 23.78 GB of transformer in bf16, 9.52 GB of T5, 246 MB of CLIP, 168 MB of VAE."""
    sizes = Flux1Bundle.estimate(name).parameters
    expected = {"transformer": billions, "text_encoder_2": 4.762, "text_encoder": 0.1231, "vae": 0.0838}
    assert {part: size / 1e9 for part, size in sizes.items()} == pytest.approx(expected, rel=0.01)
