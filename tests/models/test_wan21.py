"""Texts, first frames, VAE, sizes and refused checkpoints of Wan 2.1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.family_cases import CASES, built, changed
from unirl.config.errors import ConfigError, DataError
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, plain_pipeline
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.models.wan21.family import WAN21, Wan21Bundle, Wan21Pipeline, facts
from unirl.sde.kernels import EulerODE
from unirl.types.sampling import DiffusionSamplingParams

TEXTS = ["a red circle", "  two &amp;amp; three\n\tsquares  ", "x" * 40, ""]
PARAMS = DiffusionSamplingParams(
    kernel=EulerODE(), num_inference_steps=2, height=32, width=48, num_frames=9, max_sequence_length=16
)

TOY, TOY_I2V = WAN21.toys["toy"], WAN21.toys["toy-i2v"]
BILLIONS_UMT5, BILLIONS_CLIP, BILLIONS_VAE = 5.68, 0.631, 0.127


def of(name: str) -> DiffusersPipeline[Any]:
    return built(next(case for case in CASES if case.name == name))


def plain_of(pipeline: DiffusersPipeline[Any]) -> Any:
    return plain_pipeline(pipeline.bundle, pipeline.bundle.untrained())


# Conditions


def test_texts_are_embedded_as_diffusers_embeds_them() -> None:
    pipeline = of("wan21")
    positive, negative = plain_of(pipeline).encode_prompt(TEXTS, ["blurred, slow"] * 4, max_sequence_length=16)
    for expected, texts in ((positive, TEXTS), (negative, ["blurred, slow"] * 4)):
        ours = pipeline.embed(texts, 16)
        assert ours.embeds.shape == (4, 16, 32) and ours.mask is not None
        assert (ours.embeds - expected).abs().max() < 1e-6
        assert not ours.embeds[~ours.mask].any() and ours.embeds[ours.mask].any(-1).all()


def test_text_with_clip_tokens_has_the_fixed_length_of_the_transformer() -> None:
    pipeline = of("wan21-i2v")
    short, usual = pipeline.embed(TEXTS, 16), of("wan21").embed(TEXTS, 16)
    assert short.embeds.shape[1] == 512 and not short.embeds[:, 16:].any()
    assert torch.equal(short.embeds[:, :16], usual.embeds)
    with pytest.raises(ConfigError, match=r"max_sequence_length=600.*512 tokens of text. Use at most 512"):
        pipeline.embed(TEXTS, 600)


@pytest.mark.parametrize("frames", [1, 9])
def test_a_first_frame_gives_the_tensors_of_diffusers(frames: int) -> None:
    from unirl.models.images import to_pil

    pipeline = of("wan21-i2v")
    plain, params = plain_of(pipeline), replace(PARAMS, num_frames=frames)
    pixels = torch.randint(256, (2, 1, 3, 32, 48), generator=torch.Generator().manual_seed(0)) / 255
    assert pipeline.condition_image_encoder is not None
    with torch.no_grad():
        result: Any = pipeline.condition_image_encoder.encode(pixels, params)
        for row in range(2):
            image = to_pil(pixels[row, 0])
            shown = plain.video_processor.preprocess(image, height=32, width=48)
            _, expected = plain.prepare_latents(shown, 1, 4, 32, 48, frames, torch.float32, torch.device("cpu"))
            assert expected.shape == (1, 8, (frames - 1) // 4 + 1, 4, 6)
            assert (result["image"].latents[row] - expected[0]).abs().max() < 1e-5
            assert (result["vision"].embeds[row] - plain.encode_image(image)[0]).abs().max() < 1e-5
    assert (result["vision"].embeds[0] - result["vision"].embeds[1]).abs().max() > 1e-2


# The VAE


def test_an_image_is_encoded_as_a_video_of_one_frame() -> None:
    pipeline = of("wan21")
    pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    encoder = pipeline.bundle.encoder()
    with torch.no_grad():
        latents = encoder.encode(pixels)
        assert latents.shape == (2, 4, 1, 4, 6)
        assert torch.equal(latents, encoder.encode(pixels[:, :, None]))
        still = torch.cat([pixels[:, :, None]] * 5, dim=2)
        assert (encoder.encode(still)[:, :, :1] - latents).abs().max() < 1e-5  # nothing looks into the future


def test_a_vae_that_works_on_one_row_at_a_time_draws_the_same() -> None:
    latents = torch.randn(3, 4, 2, 4, 6, generator=torch.Generator().manual_seed(2))
    whole = of("wan21").decode(latents)
    bundle = Wan21Bundle(path="toy", dtype="fp32")
    sliced: Any = Wan21Pipeline(bundle, vae_slicing=True, vae_tiling=True)
    vae: Any = bundle.modules["vae"]
    assert vae.use_slicing and vae.use_tiling
    gap = sliced.decode(latents).stacked().int() - whole.stacked().int()  # type: ignore[union-attr]
    assert gap.abs().max() <= 1


def test_a_model_on_pixels_has_no_vae_to_slice() -> None:
    with pytest.raises(ConfigError, match=r"pipeline.vae_tiling=true: sd3 decodes by no VAE, which has no tiling"):
        SD3Pipeline(SD3Bundle(path="quickstart", dtype="fp32"), vae_tiling=True)


# Public checkpoints


@pytest.mark.parametrize(
    ("name", "transformer", "shift", "pictures"),
    [
        ("T2V-1.3B", 1.42, 3.0, 0),
        ("T2V-14B", 14.29, 3.0, 0),
        ("I2V-14B-480P", 16.40, 3.0, 1),
        ("I2V-14B-720P", 16.40, 5.0, 1),
    ],
)
def test_the_public_checkpoints_are_known_without_a_connection(
    name: str, transformer: float, shift: float, pictures: int
) -> None:
    path = f"Wan-AI/Wan2.1-{name}-Diffusers"
    known, estimate = Wan21Bundle.facts_of(path), Wan21Bundle.estimate(path)
    # Sizes of the safetensors on the hub, halved where they are bf16.
    expected = {"transformer": transformer, "text_encoder": BILLIONS_UMT5, "vae": BILLIONS_VAE}
    expected |= {"image_encoder": BILLIONS_CLIP} if pictures else {}
    assert {part: count / 1e9 for part, count in estimate.parameters.items()} == pytest.approx(expected, rel=0.01)
    assert known.condition_images == (pictures, pictures)
    assert known.schedule == replace(known.schedule, shift=shift, grid="unipc")  # type: ignore[type-var]
    params = replace(PARAMS, height=480, width=832, num_frames=81)
    assert known.latent_shape(params) == (16, 21, 60, 104) and known.image_seq_len(params) == 21 * 30 * 52


# Bad input


def test_checkpoints_of_other_models_are_refused_by_name() -> None:
    for configs, match in (
        (
            changed(TOY, "transformer", in_channels=7),
            r"in_channels=7 and its VAE 4 channels: text to video has in_channels=4, image .* 12",
        ),
        (
            changed(TOY_I2V, "transformer", pos_embed_seq_len=10),
            r"a first and a last frame \(pos_embed_seq_len is set\)",
        ),
        (replace(TOY, settings={"boundary_ratio": 0.9}), r"a Wan 2.2 checkpoint .*unirl.models.wan22.family"),
        (replace(TOY, settings={"expand_timesteps": True}), r"a Wan 2.2 checkpoint"),
    ):
        with pytest.raises(DataError, match=match) as caught:
            facts(configs, 1)
        assert caught.value.code == 4001
    assert facts(replace(TOY, settings={"boundary_ratio": None, "expand_timesteps": False}), 1) == facts(TOY, 1)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_frames": 80}, r"num_frames=80: .*Use 81"),
        ({"height": 472}, r"height=472 is not a positive multiple of 16 .*Use 480"),
        ({"guidance_scale_2": 3.0}, r"guidance_scale_2=3 is for models with two experts"),
    ],
)
def test_impossible_settings_are_refused_with_possible_ones(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        facts(TOY, 1).check(replace(PARAMS, **changes))


def test_every_toy_has_its_number_of_condition_images() -> None:
    assert {name: WAN21.facts(toy, 4).condition_images for name, toy in WAN21.toys.items()} == {
        "toy": (0, 0),
        "toy-i2v": (1, 1),
        **{f"random:Wan-AI/Wan2.1-T2V-{size}-Diffusers": (0, 0) for size in ("1.3B", "14B")},
        **{f"random:Wan-AI/Wan2.1-I2V-14B-{size}-Diffusers": (1, 1) for size in ("480P", "720P")},
    }
