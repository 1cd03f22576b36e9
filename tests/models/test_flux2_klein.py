"""Text, VAE patches, condition images, variants and sizes of FLUX.2-klein."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.models.family_cases import changed
from unirl.config.errors import DataError
from unirl.models.chunks import select_conditions
from unirl.models.denoising.diffusers_pipeline import difference, plain_pipeline, sample_with_euler
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.flux2_klein.family import FLUX2_KLEIN, Flux2KleinBundle, Flux2KleinPipeline, facts, text_layers
from unirl.sde.guidance import NoGuidance
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ("a red circle", "two blue squares on the left, and more words than are kept", "")
PARAMS = DiffusionSamplingParams(
    kernel=EulerODE(), num_inference_steps=3, height=64, width=64, guidance_scale=3.5, max_sequence_length=48
)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def toy() -> Flux2KleinPipeline:
    """With drawn moments of the VAE's channels: a fresh VAE has 0 and 1, which hide a fault."""
    pipeline = Flux2KleinPipeline(Flux2KleinBundle(path="toy", dtype="fp32"))
    generator = torch.Generator().manual_seed(1)
    moments = pipeline.bundle.modules["vae"].get_submodule("bn")
    moments.get_buffer("running_mean").normal_(generator=generator)
    moments.get_buffer("running_var").uniform_(0.5, 2.0, generator=generator)
    return pipeline


@pytest.fixture(scope="module")
def distilled() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(Flux2KleinBundle(path="toy-distilled", dtype="fp32"))


def pictures_of(params: DiffusionSamplingParams, count: int, seed: int = 0) -> list[ConditionImages]:
    """`count` images of each prompt."""
    size, generator = (count, 3, params.height, params.width), torch.Generator().manual_seed(seed)
    return [ConditionImages.of(torch.randint(256, size, generator=generator) / 255) for _ in PROMPTS]


@pytest.mark.parametrize("length", [16, 48])
def test_embeddings_are_those_of_diffusers(toy: Flux2KleinPipeline, length: int) -> None:
    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    with torch.no_grad():
        embeds, _ = plain.encode_prompt(
            list(PROMPTS), max_sequence_length=length, text_encoder_out_layers=text_layers(4)
        )
        ours = toy.bundle.text_encoder().encode(PROMPTS, length)
    assert (ours.embeds - embeds).abs().max() < 1e-5
    assert ours.mask is not None
    assert ours.mask.sum(1).tolist() == [min(25 + len(text), length) for text in PROMPTS]


def test_the_layers_of_the_published_encoders_are_those_of_diffusers() -> None:
    assert text_layers(36) == (9, 18, 27)


@torch.no_grad()
def test_a_text_does_not_depend_on_its_neighbours(toy: Flux2KleinPipeline) -> None:
    encoder = toy.bundle.text_encoder()
    long = PROMPTS[1]
    among = encoder.encode([long, "a", "", "b"], 48)
    alone = encoder.encode([long] * 4, 48)
    assert torch.equal(among.embeds[0], alone.embeds[0])


@torch.no_grad()
def test_latents_of_images_are_those_of_diffusers(toy: Flux2KleinPipeline) -> None:
    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    pixels = pictures_of(PARAMS, 1)[0].pixels
    theirs = plain._encode_vae_image(pixels * 2 - 1, None)
    ours = toy.bundle.encoder().encode(pixels)
    assert ours.shape == (1, 16, 4, 4)
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("scale", [1.0, 3.5])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_our_sampler_edits_as_diffusers_does(toy: Flux2KleinPipeline, width: int, scale: float, count: int) -> None:
    params = dataclasses.replace(PARAMS, width=width, guidance_scale=scale, negative_prompt="blurred")
    shown = pictures_of(params, count) if count else None
    plain = plain_pipeline(toy.bundle, toy.bundle.untrained())
    assert difference(toy, plain, PROMPTS, params, shown, own_schedule=True) < TOLERANCE


@torch.no_grad()
def test_the_comparison_detects_other_images_and_another_order(toy: Flux2KleinPipeline) -> None:
    shown = pictures_of(PARAMS, 2)
    turned = [ConditionImages.of(pictures.pixels.flip(0)) for pictures in shown]
    others = [None, shown, turned, pictures_of(PARAMS, 2, seed=5)]
    drawn = [sample_with_euler(toy, PROMPTS, PARAMS, pictures).latents for pictures in others]
    apart = [float((a - b).abs().max()) for i, a in enumerate(drawn) for b in drawn[:i]]
    assert min(apart) > 10 * TOLERANCE


@torch.no_grad()
def test_with_images_replay_equals_sampling_and_rows_are_independent(toy: Flux2KleinPipeline) -> None:
    params = dataclasses.replace(PARAMS, kernel=FlowSDEStrategy())
    params = params.pinned(0, tuple(toy.sigmas(params).tolist()))
    conditions, noise, ids = toy.encode(PROMPTS, params, pictures_of(params, 2)), NoiseSource(0, "r", 0), list("abc")
    segment = toy.stage.sample(conditions, toy.initial_noise(noise, ids, params), params, noise, ids)
    assert torch.equal(toy.stage.replay(conditions, segment, segment.sde_indices).logp, segment.logp)
    one, last = select_conditions(conditions, [2]), toy.initial_noise(noise, ["c"], params)
    assert torch.equal(toy.stage.sample(one, last, params, noise, ["c"]).final, segment.final[2:])


def test_a_distilled_model_matches_diffusers_and_refuses_a_scale(distilled: Flux2KleinPipeline) -> None:
    params = dataclasses.replace(PARAMS, guidance_scale=1.0)
    plain = plain_pipeline(distilled.bundle, distilled.bundle.untrained())
    assert difference(distilled, plain, PROMPTS, params, own_schedule=True) < TOLERANCE
    with pytest.raises(ValueError, match=r"guidance_scale=3\.5: this model was distilled .* Use guidance_scale=1"):
        distilled.facts.check(PARAMS)


def test_an_exported_distilled_model_is_read_as_distilled(distilled: Flux2KleinPipeline, tmp_path: Path) -> None:
    folder = distilled.write_model({}, tmp_path / "model")
    assert Flux2KleinBundle.facts_of(str(folder)).guidance == NoGuidance()


def test_a_side_must_hold_whole_tokens(toy: Flux2KleinPipeline) -> None:
    toy.facts.check(PARAMS)
    with pytest.raises(ValueError, match=r"sampling\.width=72 is not a positive multiple of 16 .* Use 64"):
        toy.facts.check(dataclasses.replace(PARAMS, width=72))


@pytest.mark.parametrize(
    ("component", "values", "said"),
    [
        ("transformer", {"guidance_embeds": True}, "has guidance_embeds=True, .* has False"),  # FLUX.2-dev
        ("transformer", {"in_channels": 32}, "has in_channels=32, .* has 16"),
        ("text_encoder", {"hidden_size": 64}, "has joint_attention_dim=96, .* has 192"),
    ],
)
def test_components_that_do_not_fit_together_are_refused(component: str, values: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        facts(changed(FLUX2_KLEIN.toys["toy"], component, **values), 1)
    assert refused.value.code == 4001


def test_the_value_head_reads_the_mean_of_real_tokens(toy: Flux2KleinPipeline) -> None:
    from unirl.models.value_head import pooled_text

    text = toy.encode(PROMPTS, PARAMS)["text"]
    assert isinstance(text, TextEmbedCondition)
    pooled = pooled_text({"text": text})
    assert pooled is not None
    assert pooled.shape == (3, toy.facts.text_width)
    kept = 25 + len(PROMPTS[0])
    assert torch.allclose(pooled[0], text.embeds[0, :kept].mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "billions", "text"),
    [("4B", 3.88, 4.022), ("9B", 9.08, 8.191), ("base-4B", 3.88, 4.022), ("base-9B", 9.08, 8.191)],
)
def test_published_checkpoints_have_their_published_size(name: str, billions: float, text: float) -> None:
    """The files on the hub: 7.75 and 18.2 GB of transformer in bf16, 168 MB of VAE; Qwen3 has its published size."""
    sizes = Flux2KleinBundle.estimate(f"black-forest-labs/FLUX.2-klein-{name}").parameters
    expected = {"transformer": billions, "text_encoder": text, "vae": 0.0840}
    assert {part: size / 1e9 for part, size in sizes.items()} == pytest.approx(expected, rel=0.01)
