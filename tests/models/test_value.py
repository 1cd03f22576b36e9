"""The value networks: of latents, told of noise level and prompt, and of hidden states; both zero at first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unirl.models.value_head import TokenValueHead, ValueHead, pooled_text
from unirl.testing.toy import toy_facts, toy_params, toy_stage, toy_track
from unirl.types.conditions import TextEmbedCondition
from unirl.types.primitives import Texts

SHAPES = {"flat": (3,), "image": (3, 6, 4), "video": (3, 5, 6, 4), "large": (3, 40, 24)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained_head(text_width: int | None = 4, width: int = 8, seed: int = 0) -> ValueHead:
    """A head whose last layer is not zero."""
    head = ValueHead.of(replace(toy_facts(), text_width=text_width), width, seed)
    head.output_layer.weight.data = normal(1, width, seed=seed)
    return head


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_fresh_head_says_zero_and_can_learn(shape: tuple[int, ...]) -> None:
    head = ValueHead.of(toy_facts(), 8, seed=0)
    result = head(normal(2, *shape), torch.tensor([1.0, 0.3]), normal(2, 4))
    assert result.shape == (2,) and torch.equal(result, torch.zeros(2))
    (result - 1).square().sum().backward()
    assert head.output_layer.weight.grad is not None and head.output_layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_reads_latent_noise_level_and_prompt_of_each_row_alone(shape: tuple[int, ...]) -> None:
    head, x, sigma, text = trained_head(), normal(3, *shape), torch.tensor([0.9, 0.5, 0.1]), normal(3, 4, seed=1)
    result = head(x, sigma, text)
    for changed in ((x + 1, sigma, text), (x, sigma / 2, text), (x, sigma, text.flip(1))):
        assert (head(*changed) - result).abs().min() > 1e-4
    for row in range(3):
        only = slice(row, row + 1)
        assert torch.allclose(head(x[only], sigma[only], text[only]), result[only], atol=1e-6)


def test_every_weight_gets_a_gradient() -> None:
    head = trained_head()
    head(normal(2, 3, 5, 6, 4), torch.tensor([0.7, 0.2]), normal(2, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_an_image_is_a_video_of_one_frame_and_the_order_of_frames_counts() -> None:
    head, sigma, text = trained_head(), torch.tensor([0.5, 0.4]), normal(2, 4)
    image = normal(2, 3, 8, 8)
    assert torch.equal(head(image, sigma, text), head(image[:, :, None], sigma, text))
    video = normal(2, 3, 4, 8, 8, seed=2)
    assert (head(video, sigma, text) - head(video[:, :, [0, 2, 1, 3]], sigma, text)).abs().min() > 1e-5


def test_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = ValueHead.of(toy_facts(), 8, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    again, other = (ValueHead.of(toy_facts(), 8, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["levels.0.weight"], other["levels.0.weight"])


def test_text_is_the_pooled_embedding_else_the_mean_over_real_tokens() -> None:
    embeds, pooled = normal(2, 3, 5), normal(2, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    embeds[1, 2] = torch.nan
    assert torch.equal(pooled_text({"text": TextEmbedCondition(embeds=embeds, pooled=pooled, mask=mask)}), pooled)
    result = pooled_text({"text": TextEmbedCondition(embeds=embeds, mask=mask)})
    assert torch.allclose(result, torch.stack([embeds[0, :2].mean(0), embeds[1, 0]]))
    assert torch.allclose(pooled_text({"text": TextEmbedCondition(embeds=embeds[:1])}), embeds[:1].mean(1))
    assert pooled_text({"text": Texts(texts=["a"])}) is None and pooled_text({}) is None


@pytest.mark.parametrize(("built", "fed"), [(4, 5), (4, None), (None, 4)])
def test_text_that_the_facts_do_not_state_is_refused(built: int | None, fed: int | None) -> None:
    head = trained_head(text_width=built)
    text = None if fed is None else normal(2, fed)
    with pytest.raises(
        ValueError,
        match=rf"built for pooled text of width {built}, but the prompts have width {fed}: correct .*text_width",
    ):
        head(normal(2, 3, 4, 4), torch.ones(2), text)


def test_a_model_without_text_needs_none() -> None:
    head = trained_head(text_width=None)
    assert (head(normal(2, 3, 4, 4), torch.ones(2), None)).abs().min() > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_stage_asks_it_about_the_states_before_recorded_steps(dtype: str) -> None:
    stage = toy_stage()
    stage.value_head = trained_head()
    track = toy_track(stage, params=toy_params(guidance_scale=2.0, trajectory_dtype=dtype))
    segment = track.segment
    result = stage.values(track.conditions, segment, (3, 0))
    assert result.shape == (len(track), 2) and result.dtype == torch.float32
    text = track.conditions["text"].pooled
    for column, step in enumerate((3, 0)):
        x, sigma = segment.latents_at(step).float(), segment.sigmas[step].expand(len(track))
        assert torch.allclose(result[:, column], stage.value_head(x, sigma, text), atol=1e-6)


def test_a_fresh_head_of_hidden_states_says_zero_is_a_function_of_its_seed_and_can_learn() -> None:
    before = torch.get_rng_state()
    head, again, other = (TokenValueHead.of(9, 8, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(head.hidden.weight, again.hidden.weight)
    assert not torch.equal(head.hidden.weight, other.hidden.weight)
    result = head(normal(5, 9))
    assert result.shape == (5,) and torch.equal(result, torch.zeros(5))
    (result - 1).square().sum().backward()
    assert head.output_layer.weight.grad is not None and head.output_layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_any_dtype_and_scale_are_judged_in_float32_one_by_one(dtype: torch.dtype) -> None:
    head, hidden = TokenValueHead.of(9, 8, seed=0), normal(5, 9).to(dtype)
    head.output_layer.weight.data = normal(1, 8)
    result = head(hidden).detach()
    assert result.dtype == torch.float32 and float(result.std()) > 0.1
    assert torch.allclose(head(hidden * 1024), result, atol=1e-4)
    for i in range(5):
        assert torch.allclose(head(hidden[i : i + 1]), result[i : i + 1], atol=1e-6)
