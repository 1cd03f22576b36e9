"""Chats, rows of unequal length and the guidance scale of Z-Image, compared with diffusers."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import changed
from unirl.config.errors import DataError
from unirl.models.chunks import select_conditions
from unirl.models.denoising.diffusers_pipeline import sample_with_euler
from unirl.models.z_image.family import Z_IMAGE, ZImageBundle, ZImagePipeline
from unirl.testing import family
from unirl.types.sampling import DiffusionSamplingParams

RAGGED = ("x", "a red circle and more of it", "", "more letters than there are tokens for it, " * 3)
LENGTH = 80


@pytest.fixture(scope="module")
def pipeline() -> ZImagePipeline:
    return ZImagePipeline(ZImageBundle(path="toy", dtype="fp32"))


def params_of(scale: float, **changes: Any) -> DiffusionSamplingParams:
    return replace(family.euler((32, 48, 1), scale, LENGTH), **changes)


@torch.no_grad()
def test_ragged_prompts_are_embedded_as_diffusers_embeds_each_alone(pipeline: ZImagePipeline) -> None:
    plain, ours = family.untrained(pipeline), pipeline.embed(RAGGED, LENGTH)
    assert ours.mask is not None and len({n // 32 for n in ours.mask.sum(1).tolist()}) == 3
    for i, text in enumerate(RAGGED):
        [alone], _ = plain.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=LENGTH)
        assert int(ours.mask[i].sum()) == len(alone)
        assert float((ours.embeds[i][ours.mask[i]] - alone).abs().max()) < 1e-5


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_rows_of_unequal_length_are_drawn_as_diffusers_draws_each_alone(pipeline: ZImagePipeline, scale: float) -> None:
    plain, params = family.untrained(pipeline), params_of(scale, negative_prompt="blurred")
    drawn = sample_with_euler(pipeline, RAGGED, params)
    pinned = params.pinned(0, tuple(pipeline.sigmas(params).tolist()))
    for i, text in enumerate(RAGGED):
        pixels = pipeline.sample_with_diffusers(plain, [text], drawn.x_T[i : i + 1].clone(), pinned)
        ours = pipeline.decoder.decode(drawn.latents[i : i + 1])
        assert float((ours - pixels).abs().max()) < family.TOLERANCE


@torch.no_grad()
def test_a_row_has_the_same_bits_beside_shorter_and_longer_ones(pipeline: ZImagePipeline) -> None:
    params = params_of(4.0)
    x = torch.randn(len(RAGGED), *pipeline.facts.latent_shape(params), generator=torch.Generator().manual_seed(0))
    sigma, conditions = torch.linspace(0.2, 0.9, len(RAGGED)), pipeline.encode(RAGGED, params)

    def velocity(rows: list[int]) -> Tensor:
        guidance = pipeline.facts.guidance_of(params)
        return pipeline.stage.velocity(x[rows], sigma[rows], select_conditions(conditions, rows), guidance)

    together = velocity([0, 1, 2, 3])
    for rows in ([0], [1], [3], [2, 0], [3, 1, 0, 2, 3]):
        assert torch.equal(velocity(rows), together[rows])


def test_every_row_is_padded_to_the_longest_possible_prompt(pipeline: ZImagePipeline) -> None:
    """Whatever it stands beside: kernels of accelerators are chosen by length and mask."""
    module, seen = pipeline.bundle.trainable(), []

    def look(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append((inputs[0].shape[1], inputs[1].sum(1).tolist()))

    handle = module.get_submodule("layers.0").register_forward_pre_hook(look)
    text, x = pipeline.embed(RAGGED, LENGTH), torch.zeros(4, 4, 4, 6)
    for rows in ([0, 1, 2, 3], [2], [3, 3]):
        pipeline.stage.denoiser.velocity(x[rows], torch.ones(len(rows)), {"text": text.select(rows)})
    handle.remove()
    assert seen == [(128, [64, 96, 64, 128]), (128, [64]), (128, [128, 128])]


def test_diffusers_counts_guidance_from_the_conditional_branch(pipeline: ZImagePipeline) -> None:
    """w v_cond + (1 - w) v_uncond = v_cond + (w - 1) (v_cond - v_uncond): its default of 5 is our 6."""
    plain, params = family.untrained(pipeline), params_of(4.0)
    drawn = sample_with_euler(pipeline, ["x"], params)
    latents = plain(
        prompt=["x"],
        guidance_scale=3.0,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        latents=drawn.x_T.clone(),
        output_type="latent",
        max_sequence_length=LENGTH,
    ).images
    assert float((drawn.latents - latents).abs().max()) < family.TOLERANCE
    assert inspect.signature(plain.__call__).parameters["guidance_scale"].default == 5.0


def test_no_gradient_comes_from_the_padding_of_a_batch(pipeline: ZImagePipeline) -> None:
    """A row's gradient is that of the network as diffusers runs it on the row alone."""
    text, module = pipeline.embed(RAGGED, LENGTH), pipeline.bundle.trainable()
    assert text.mask is not None
    x, sigma = torch.randn(4, 4, 4, 6), torch.full((4,), 0.5)
    pipeline.stage.denoiser.velocity(x, sigma, {"text": text})[0].square().sum().backward()
    ours = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    plain = pipeline.bundle.untrained().requires_grad_(True)
    out = plain([x[0][:, None]], torch.tensor([0.5]), [text.embeds[0][text.mask[0]]], return_dict=False)[0]
    out[0].square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("path", ["Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo"])
def test_published_sizes(path: str) -> None:
    parameters = ZImageBundle.estimate(path).parameters
    assert parameters["transformer"] == pytest.approx(6.15e9, rel=0.01)
    assert parameters["text_encoder"] == pytest.approx(4.02e9, rel=0.01)
    assert parameters["vae"] == pytest.approx(83.8e6, rel=0.01)


def test_the_two_published_models_have_their_own_shift() -> None:
    shifts = [ZImageBundle.facts_of(f"Tongyi-MAI/Z-Image{end}").schedule.sigmas(2, 256)[1] for end in ("", "-Turbo")]
    assert [round(float(level), 6) for level in shifts] == [round(6 / 7, 6), 0.75]


def test_a_transformer_that_reads_images_is_refused() -> None:
    configs = changed(Z_IMAGE.toys["toy"], "transformer", siglip_feat_dim=8)
    with pytest.raises(DataError, match="siglip_feat_dim=8"):
        Z_IMAGE.facts(configs, 1)


def test_sizes_off_the_grid_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"height=40 .* Use 32"):
        ZImageBundle.facts_of("toy").check(params_of(1.0, height=40))
