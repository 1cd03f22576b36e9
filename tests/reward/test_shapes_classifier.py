"""The shapes classifier: right about drawn pictures, of one mind with the detector, and smooth."""

import itertools

import numpy as np
import pytest
import torch

from unirl.config.errors import RewardError
from unirl.reward.local.shapes import GROUND, PALETTE, SHAPES, coverage, sight
from unirl.reward.local.shapes_classifier import ShapesClassifierRewardScorer, mean_log_prob
from unirl.types.reward import RewardRequest

ALL = list(itertools.product(PALETTE, SHAPES))
PROMPTS = [f"a {color} {shape}" for color, shape in ALL]


@pytest.fixture(scope="module")
def scorer() -> ShapesClassifierRewardScorer:
    return ShapesClassifierRewardScorer(device="cpu", batch_size=7)


def drawn(size: int = 24, center: float = 0.5, half: float = 0.3) -> torch.Tensor:
    """[24, 3, size, size] every color in every shape."""
    pictures = []
    for color, shape in ALL:
        cover = coverage(shape, size, (center * size, center * size), (half * size, half * size))
        pictures.append(np.array(GROUND) + (np.array(PALETTE[color]) - GROUND) * cover[..., None])
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()


def scores(scorer: ShapesClassifierRewardScorer, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    ids = [str(i) for i in range(len(prompts))]
    return scorer.score(RewardRequest(sample_ids=ids, prompts=prompts, images=images)).total


@pytest.mark.parametrize(("center", "half"), [(0.5, 0.3), (0.44, 0.27), (0.56, 0.35)])
def test_each_image_scores_highest_for_its_own_prompt_and_the_detector_agrees(scorer, center, half) -> None:
    images = drawn(center=center, half=half)
    table = torch.stack([scores(scorer, images, [prompt] * len(images)) for prompt in PROMPTS], dim=1)
    assert table.argmax(1).tolist() == list(range(len(ALL)))
    assert table.max() <= 0
    for picture, (color, shape) in zip(images.permute(0, 2, 3, 1).double().numpy(), ALL, strict=True):
        assert (sight(picture).color, sight(picture).shape) == (color, shape)


def test_noise_and_mixed_colors_score_lower(scorer) -> None:
    images, generator = drawn(), torch.Generator().manual_seed(0)
    grain = torch.randn(images.shape, generator=generator)
    stains = torch.nn.functional.interpolate(torch.randn(24, 3, 6, 6, generator=generator), (24, 24), mode="bilinear")
    clean = scores(scorer, images, PROMPTS)
    for spoiled in (images + 0.2 * grain, images + 0.15 * stains, 0.7 * images + 0.3 * images.roll(5, dims=0)):
        assert scores(scorer, spoiled.clamp(0, 1), PROMPTS).mean() < clean.mean() - 0.2


def test_the_score_does_not_depend_on_batch_or_order(scorer) -> None:
    images = drawn()
    whole = scores(scorer, images, PROMPTS)
    apart = torch.cat([scores(scorer, images[i : i + 1], PROMPTS[i : i + 1]) for i in range(len(ALL))])
    torch.testing.assert_close(whole, apart, atol=1e-6, rtol=0)
    torch.testing.assert_close(scores(scorer, images.flip(0), PROMPTS[::-1]), whole.flip(0), atol=1e-6, rtol=0)


def test_the_gradient_is_that_of_the_score(scorer) -> None:
    """Along random directions, by central differences in float64."""
    scorer.model.double()
    try:
        x = (drawn()[:4].double() + 0.05 * torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))).clamp(
            0, 1
        )
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        def objective(images: torch.Tensor) -> torch.Tensor:
            return mean_log_prob(scorer.model(images), torch.tensor([[0, 2]] * len(images)))

        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(leaf).sum(), leaf)
        along = (gradient * direction).flatten(1).sum(1)
        with torch.no_grad():
            differences = (objective(x + 1e-6 * direction) - objective(x - 1e-6 * direction)) / 2e-6
        torch.testing.assert_close(along, differences, atol=1e-6, rtol=1e-5)
        assert along.abs().min() > 0
    finally:
        scorer.model.float()


def test_the_objective_is_the_score_and_has_a_gradient(scorer) -> None:
    images = drawn(size=48).requires_grad_()
    objective = scorer.objective(images, PROMPTS)
    torch.testing.assert_close(objective.detach(), scores(scorer, images.detach(), PROMPTS), atol=1e-6, rtol=0)
    objective.sum().backward()
    assert images.grad is not None and bool((images.grad.flatten(1).abs().sum(1) > 0).all())


@pytest.mark.parametrize("prompt", ["a circle", "red", "a red green circle", "a dog", ""])
def test_a_prompt_without_exactly_one_color_and_shape_is_refused(scorer, prompt) -> None:
    with pytest.raises(RewardError, match=r"one color .* and one shape"):
        scores(scorer, drawn()[:1], [prompt])
    with pytest.raises(RewardError, match=r"one color .* and one shape"):
        scorer.check_prompt(prompt, {})
