"""Images in the text encoder, references, sizes and refused checkpoints of Qwen-Image-Edit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES, built, changed
from tests.models.test_qwen_image import RAGGED, expect_equal
from unirl.config.errors import DataError
from unirl.models.denoising.diffusers_pipeline import difference, sample_with_euler
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.vae import IMAGE
from unirl.models.images import to_pil
from unirl.models.qwen_image.family import QwenImageBundle
from unirl.models.qwen_image_edit.family import (
    QWEN_IMAGE_EDIT,
    TEMPLATES,
    QwenImageEditBundle,
    QwenImageEditPipeline,
    QwenImageEditTextEncoder,
    image_token_types,
    size_of_area,
    toy_tokenizers,
)
from unirl.sde.noise import NoiseSource
from unirl.testing.family import SEEN, TOLERANCE, check_family, euler, untrained
from unirl.types.conditions import LatentCondition

GUIDED = euler((32, 48, 1), 4.5, 60)


def shown(count: int, per_prompt: int = 1, name: str = "p") -> list[ConditionImages]:
    pixels = NoiseSource(0, "eval", 0).uniform([f"{name}{i}" for i in range(count)], "p", (per_prompt, 3, 32, 48))
    return [ConditionImages.of(row.mul(255).round().div(255)) for row in pixels]


@pytest.fixture(scope="module")
def edit() -> QwenImageEditPipeline:
    return built(next(case for case in CASES if case.name == "qwen_image_edit"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def plus() -> QwenImageEditPipeline:
    return QwenImageEditPipeline(QwenImageEditBundle(path="toy-plus", dtype="fp32"))


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_openings_have_as_many_toy_tokens_as_diffusers_drops() -> None:
    tokenizer = toy_tokenizers()["tokenizer"]
    for template in TEMPLATES.values():
        assert len(tokenizer(template.opening).input_ids) == template.num_dropped


def seen_by_diffusers(
    pipeline: QwenImageEditPipeline, texts: list[str], images: list[Any]
) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():
        result: tuple[Tensor, Tensor | None] = untrained(pipeline).encode_prompt(texts, images)
    return result


def test_the_encoder_reads_images_with_their_positions_as_in_diffusers(edit: QwenImageEditPipeline) -> None:
    pictures = shown(len(RAGGED))
    texts, images = [text or " " for text in RAGGED], [to_pil(row.pixels[0]) for row in pictures]
    plain, ours = untrained(edit), edit.embed(RAGGED, 60, pictures)
    with torch.no_grad(), image_token_types(plain):
        theirs = plain.encode_prompt(texts, images)
    assert ours.mask is not None
    expect_equal(ours.embeds, ours.mask, *theirs)
    # Else the hook that tells the encoder of places is of no use any more.
    flat, _ = seen_by_diffusers(edit, texts, images)
    assert (flat - theirs[0]).abs().max() > 1e-2


def test_a_prompt_is_encoded_with_its_own_images_or_without_any(edit: QwenImageEditPipeline) -> None:
    first, second = shown(2)
    together = edit.embed(["x", "x"], 16, [first, second])
    assert (together.embeds[0] - together.embeds[1]).abs().max() > 1e-3
    edit.embed.cache.clear()
    assert torch.equal(edit.embed(["x"], 16, [second]).embeds[0], together.embeds[1])
    assert edit.embed(["x"], 16).embeds.shape[1] == 16


def test_a_prompt_that_contains_the_image_token_is_refused(edit: QwenImageEditPipeline) -> None:
    encoder = edit.bundle.text_encoder()
    assert isinstance(encoder, QwenImageEditTextEncoder)
    with pytest.raises(ValueError, match=r"contains <\|image_pad\|>, which is the model's own image token. Remove it"):
        encoder.encode_with_images(["an <|image_pad|>"], 60, shown(1)[0].pixels[None])


@pytest.mark.parametrize("ratio", [1.0, 1.5, 9 / 16, 2.39])
def test_the_image_size_of_the_encoder_is_that_of_diffusers(ratio: float) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    size = size_of_area(384 * 384, ratio)
    assert size == calculate_dimensions(384 * 384, ratio)


# --- images ---------------------------------------------------------------------------------------------------------


def test_references_are_the_latents_of_diffusers(edit: QwenImageEditPipeline) -> None:
    pictures = shown(3)
    image = edit.encode(RAGGED[:3], GUIDED, pictures)[IMAGE]
    assert isinstance(image, LatentCondition) and image.latents.shape == (3, 1, 4, 4, 6)
    pixels = torch.cat([row.pixels for row in pictures])[:, :, None] * 2 - 1
    with torch.no_grad():
        theirs = untrained(edit)._encode_vae_image(pixels, None)[:, :, 0]
    assert (image.latents[:, 0] - theirs).abs().max() < 1e-5


def test_two_images_are_combined_as_in_diffusers(plus: QwenImageEditPipeline) -> None:
    texts, pictures = RAGGED[:3], shown(3, per_prompt=2)
    assert difference(plus, untrained(plus), texts, GUIDED, pictures, own_schedule=True) < TOLERANCE
    drawn = sample_with_euler(plus, texts, GUIDED, pictures).latents
    other = sample_with_euler(plus, texts, GUIDED, [ConditionImages.of(row.pixels.flip(0)) for row in pictures]).latents
    assert (drawn - other).abs().max() > SEEN


@pytest.mark.parametrize("name", ["edit", "plus"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_diffusers_is_given_long_prompts_truncated_as_ours_are(
    name: str, guidance_scale: float, request: pytest.FixtureRequest
) -> None:
    pipeline: QwenImageEditPipeline = request.getfixturevalue(name)
    short = replace(GUIDED, max_sequence_length=16, guidance_scale=guidance_scale)
    assert difference(pipeline, untrained(pipeline), RAGGED[:3], short, shown(3)) < TOLERANCE / 10


def test_an_image_affects_the_sample_through_latents_and_through_the_encoder(edit: QwenImageEditPipeline) -> None:
    here, there = (edit.encode(["x"], GUIDED, shown(1, name=name)) for name in "pq")
    x, sigma = torch.zeros(1, 4, 4, 6), torch.tensor([0.5])
    with torch.no_grad():
        one, latents, seen = (
            edit.stage.velocity(x, sigma, conditions, edit.facts.guidance)
            for conditions in (here, {**here, IMAGE: there[IMAGE]}, {**here, "text": there["text"]})
        )
    assert (one - latents).abs().max() > SEEN and (one - seen).abs().max() > SEEN


@pytest.mark.slow
def test_the_checks_of_every_family_hold_with_several_images() -> None:
    check_family(QwenImageEditPipeline(QwenImageEditBundle(path="toy-plus", dtype="fp32")), max_sequence_length=40)


def test_a_network_in_bf16_gives_velocities_in_fp32() -> None:
    pipeline = QwenImageEditPipeline(QwenImageEditBundle(path="toy-plus", dtype="bf16"))
    drawn = sample_with_euler(pipeline, ["x"], GUIDED, shown(1)).latents
    assert drawn.dtype == torch.float32 and bool(drawn.isfinite().all())


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("edition", "most"), [("", 1), ("-2509", 3), ("-2511", 3)])
def test_the_public_checkpoints_are_known_without_a_connection(edition: str, most: int) -> None:
    facts = QwenImageEditBundle.facts_of(f"Qwen/Qwen-Image-Edit{edition}")
    params = replace(GUIDED, height=1024, width=1024, max_sequence_length=512)
    assert facts.latent_shape(params) == (16, 128, 128)
    assert facts.condition_images == (1, most) and facts.tokens_of(params) == (1 + most) * 4096 + 512


@pytest.mark.parametrize("switch", ["guidance_embeds", "use_layer3d_rope", "use_additional_t_cond"])
def test_a_transformer_with_further_inputs_is_refused(switch: str) -> None:
    configs = changed(QWEN_IMAGE_EDIT.toys["toy"], "transformer", **{switch: True})
    with pytest.raises(DataError, match=f"{switch}=True: that is another model") as caught:
        QWEN_IMAGE_EDIT.facts(configs, 1)
    assert caught.value.code == 4001


@pytest.mark.parametrize("name", ["edit", "plus"])
def test_the_text_to_image_bundle_refuses_an_editing_checkpoint(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pipeline: QwenImageEditPipeline = request.getfixturevalue(name)
    pipeline.write_model({}, tmp_path)
    assert QwenImageEditBundle.facts_of(str(tmp_path)) == pipeline.facts
    with pytest.raises(
        DataError,
        match=r"names QwenImageEdit(Plus)?Pipeline, but this bundle \(qwen_image\) reads .* of QwenImagePipeline\. "
        r"Use unirl\.models\.qwen_image_edit\.family\.QwenImageEditBundle and .*\.QwenImageEditPipeline$",
    ) as caught:
        QwenImageBundle.facts_of(str(tmp_path))
    assert caught.value.code == 4001
