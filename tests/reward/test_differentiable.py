"""Rewards with a gradient: the objective is the score, its gradient the true one, and those without say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.source_tree import ROOT
from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.combine import WeightedRewards
from unirl.reward.local.aesthetic import AestheticRewardScorer, AestheticSpec
from unirl.reward.local.clip import ClipRewardScorer, ClipSpec
from unirl.reward.local.hpsv2 import HPSv2RewardScorer, HPSv2Spec
from unirl.reward.local.image_statistics import BrightnessRewardScorer, JpegCompressibilityRewardScorer
from unirl.reward.local.imagereward import ImageRewardRewardScorer, ImageRewardSpec
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.reward.local.shapes import ShapesRewardScorer
from unirl.reward.local.shared.clip import toy_processor
from unirl.reward.local.shared.images import as_pil, clip_pixels
from unirl.reward.registry import scorers as all_scorers
from unirl.reward.service import RewardService
from unirl.types.reward import RewardRequest

PROMPTS = ["a red circle", "two dogs, at night", "x"]
LEVEL = 1 / 255


@pytest.fixture(scope="module")
def pickscore() -> PickScoreRewardScorer:
    return PickScoreRewardScorer(config=PickScoreSpec(path="toy", batch_size=4, device="cpu"))


TOY: dict[str, Any] = {"path": "toy", "batch_size": 4, "device": "cpu"}
NETWORKS: list[RewardScorer] = [
    ClipRewardScorer(config=ClipSpec(**TOY)),
    HPSv2RewardScorer(config=HPSv2Spec(**TOY)),
    AestheticRewardScorer(config=AestheticSpec(**TOY)),
    ImageRewardRewardScorer(config=ImageRewardSpec(**TOY)),
]


def scorers(pickscore: PickScoreRewardScorer) -> list[RewardScorer]:
    brightness = BrightnessRewardScorer()
    both = WeightedRewards(scorers={"fit": pickscore, "light": brightness}, weights={"fit": 2.0, "light": -0.5})
    return [pickscore, brightness, both, *NETWORKS]


def pictures(height: int = 40, width: int = 28, count: int = 3) -> Tensor:
    """Smooth pictures with some grain, whose values are levels of uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    grain = 0.1 * torch.randn(smooth.shape, generator=generator)
    return ((smooth + grain).clamp(0, 1) * 255).round() / 255


def score(scorer: RewardScorer, images: Tensor) -> Tensor:
    request = RewardRequest(sample_ids=[f"s{i}" for i in range(len(images))], prompts=PROMPTS, images=images)
    return scorer.score(request).total


def test_the_objective_is_the_score(pickscore: PickScoreRewardScorer) -> None:
    for scorer in scorers(pickscore):
        for size in ((40, 28), (32, 32), (64, 64)):
            images = pictures(*size)
            torch.testing.assert_close(scorer.objective(images, PROMPTS), score(scorer, images), atol=2e-3, rtol=0)  # type: ignore[attr-defined]
    exact = pictures(32, 32)  # nothing to scale: the same pixels
    for scorer in [pickscore, *NETWORKS]:
        torch.testing.assert_close(scorer.objective(exact, PROMPTS), score(scorer, exact), atol=1e-6, rtol=1e-5)  # type: ignore[attr-defined]


def test_the_gradient_is_that_of_finite_differences(pickscore: PickScoreRewardScorer) -> None:
    generator = torch.Generator().manual_seed(1)
    for scorer in scorers(pickscore):
        images = (0.1 + 0.8 * pictures()).requires_grad_()
        along = torch.randn(images.shape, generator=generator)
        along = along / along.flatten(1).norm(dim=1)[:, None, None, None]
        (slope,) = torch.autograd.grad(scorer.objective(images, PROMPTS).sum(), images)  # type: ignore[attr-defined]
        with torch.no_grad():
            up, down = (scorer.objective(images + h * along, PROMPTS) for h in (0.05, -0.05))  # type: ignore[attr-defined]
        result, expected = (slope * along).flatten(1).sum(1), (up - down) / 0.1
        assert expected.abs().max() > 1e-5
        torch.testing.assert_close(result, expected, atol=2e-2 * float(expected.abs().max()), rtol=0)


def test_each_row_is_scored_by_itself(pickscore: PickScoreRewardScorer) -> None:
    for scorer in scorers(pickscore):
        images = pictures().requires_grad_()
        (slope,) = torch.autograd.grad(scorer.objective(images, PROMPTS)[1], images)  # type: ignore[attr-defined]
        assert slope[1].abs().max() > 0 and slope[0].abs().max() == slope[2].abs().max() == 0
        alone = scorer.objective(images[1:2], PROMPTS[1:2])  # type: ignore[attr-defined]
        torch.testing.assert_close(alone[0], scorer.objective(images, PROMPTS)[1], atol=1e-5, rtol=0)  # type: ignore[attr-defined]


def test_the_scorer_itself_is_not_trained(pickscore: PickScoreRewardScorer) -> None:
    pickscore.objective(pictures().requires_grad_(), PROMPTS).sum().backward()
    assert all(p.grad is None for p in pickscore.model.parameters())


@pytest.mark.parametrize("edge", [32, 224])
@pytest.mark.parametrize("size", [(40, 28), (512, 384), (100, 300), (20, 24), (224, 225)], ids=str)
def test_pixels_differ_from_the_processors_by_at_most_1_2_levels(edge: int, size: tuple[int, int]) -> None:
    """White noise is the worst case; the processor rounds to levels after each of its two passes."""
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge})
    noise = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    images = (noise * 255).round() / 255
    expected = processor(as_pil(images), return_tensors="pt")["pixel_values"]
    result = clip_pixels(images, processor)
    assert result.shape == expected.shape
    gap = (result - expected).abs() * torch.tensor(processor.image_std)[:, None, None]
    assert gap.max() <= 1.2 * LEVEL and gap.mean() <= 0.4 * LEVEL


def test_pixels_are_not_rounded_to_levels() -> None:
    images = pictures(32, 32) + 0.25 * LEVEL
    result = clip_pixels(images, toy_processor().image_processor)
    mean, std = (
        torch.tensor(v)[:, None, None]
        for v in (toy_processor().image_processor.image_mean, toy_processor().image_processor.image_std)
    )
    torch.testing.assert_close(result * std + mean, images)


def test_rewards_declare_whether_they_have_a_gradient(pickscore: PickScoreRewardScorer) -> None:
    assert all(scorer.capabilities.differentiable for scorer in scorers(pickscore))
    jpeg = JpegCompressibilityRewardScorer()
    assert not jpeg.capabilities.differentiable and not ShapesRewardScorer().capabilities.differentiable
    mixed = WeightedRewards(scorers={"fit": pickscore, "size": jpeg}, weights={"fit": 1.0, "size": 1.0})
    assert not mixed.capabilities.differentiable


def test_a_scorer_of_weight_0_needs_no_gradient(pickscore: PickScoreRewardScorer) -> None:
    jpeg, images = JpegCompressibilityRewardScorer(), pictures()
    rewards = WeightedRewards(scorers={"fit": pickscore, "size": jpeg}, weights={"fit": 2.0, "size": 0.0})
    assert rewards.capabilities.differentiable
    torch.testing.assert_close(rewards.objective(images, PROMPTS), 2 * pickscore.objective(images, PROMPTS))


def test_the_service_returns_the_objective_and_names_a_reward_without_one(pickscore: PickScoreRewardScorer) -> None:
    images = pictures()
    service = RewardService(backend=pickscore)
    assert torch.equal(service.objective(images, PROMPTS), pickscore.objective(images, PROMPTS))
    with pytest.raises(RewardError, match="'JpegCompressibilityRewardScorer' has no gradient"):
        RewardService(backend=JpegCompressibilityRewardScorer()).objective(images, PROMPTS)


def test_an_objective_of_another_shape_is_refused() -> None:
    class Sloppy(BrightnessRewardScorer):
        def objective(self, images: Tensor, prompts: object = ()) -> Tensor:
            return super().objective(images).mean()

    with pytest.raises(RewardError, match=r"Sloppy, \S+: objective returned a tensor of shape \[\]\. .*\[3\]"):
        RewardService(backend=Sloppy()).objective(pictures(), PROMPTS)


def test_the_page_of_losses_on_the_gradient_names_every_scorer_that_has_one():
    page = (ROOT / "docs/algorithms/drtune.md").read_text()
    with_gradient = [name for name, scorer in all_scorers().items() if scorer.capabilities.differentiable]
    assert len(with_gradient) > 5
    assert [name for name in with_gradient if f"`{name}`" not in page] == []
