"""GAE and the value loss, against a loop that is written from the paper and against closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import huber_loss

from unirl.algorithms.shared.critic import (
    DenseLayout,
    GAEInputs,
    explained_variance,
    gae,
    moments,
    outcome_rewards,
    value_loss,
    value_metrics,
    whitened,
)
from unirl.types.results import merge, values


def loop(steps: GAEInputs, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t as the sum of (gamma lam)^k delta over the steps that exist, up to the end of the episode, one by one."""
    shape = steps.values.shape
    advantages, returns = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for b in range(shape[0]):
        real = [t for t in range(shape[1]) if steps.mask[b, t]]
        for i, t in enumerate(real):
            factor, total = 1.0, 0.0
            for k in real[i:]:
                delta = float(steps.rewards[b, k]) + gamma * float(steps.next_values[b, k]) - float(steps.values[b, k])
                total += factor * delta
                factor *= gamma * lam
                if steps.ends[b, k]:
                    break
            advantages[b, t] = total
            returns[b, t] = total + float(steps.values[b, t])
    return advantages, returns


def random_mask(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, length, generator=generator) > 0.3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 999),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_dense_rows_of_an_environment_equal_the_papers_sum(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values_, true_next = normal(3, 7, seed=seed), normal(3, 7, seed=seed + 1), normal(3, 7, seed=seed + 2)
    terminated = torch.rand(3, 7, generator=generator) < 0.2
    truncated = (torch.rand(3, 7, generator=generator) < 0.2) & ~terminated  # the next value counts, the rest does not
    mask = random_mask(3, 7, generator)
    rewards[~mask], values_[~mask], true_next[~mask] = math.nan, math.inf, math.nan
    steps = GAEInputs(rewards, values_, true_next.masked_fill(terminated, 0.0), terminated | truncated, mask)
    result, expected = gae(steps, gamma, lam), loop(steps, gamma, lam)
    for have, want in zip(result, expected, strict=True):
        assert torch.allclose(have, want, rtol=1e-12, atol=1e-12)


def test_a_truncated_episode_uses_the_next_value_and_a_terminated_one_does_not() -> None:
    values_, rewards = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]])
    ends, mask = torch.tensor([[True, True]]), torch.ones(1, 2, dtype=torch.bool)
    result = gae(GAEInputs(rewards, values_, torch.tensor([[10.0, 0.0]]), ends, mask), gamma=0.5, lam=1.0)
    assert result.advantages.tolist() == [[0.5 + 0.5 * 10.0 - 1.0, 0.25 - 2.0]]


def test_lambda_one_is_the_monte_carlo_return_minus_the_value() -> None:
    rewards, values_, mask = normal(4, 6), normal(4, 6, seed=1), torch.ones(4, 6, dtype=torch.bool)
    result = gae(GAEInputs.from_rows(rewards, values_, mask), gamma=0.9, lam=1.0)
    discounts = 0.9 ** torch.arange(6, dtype=torch.float64)
    returns = torch.stack([(rewards[:, t:] * discounts[: 6 - t]).sum(1) for t in range(6)], dim=1)
    assert torch.allclose(result.advantages, returns - values_) and torch.allclose(result.returns, returns)


def test_lambda_zero_is_the_temporal_difference_error() -> None:
    rewards, values_, mask = normal(4, 6), normal(4, 6, seed=1), torch.ones(4, 6, dtype=torch.bool)
    result = gae(GAEInputs.from_rows(rewards, values_, mask), gamma=0.9, lam=0.0)
    following = torch.cat([values_[:, 1:], torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    assert torch.allclose(result.advantages, rewards + 0.9 * following - values_)


def test_an_outcome_without_discount_gives_the_reward_minus_each_value() -> None:
    reward, values_ = normal(5), normal(5, 8)
    mask = torch.arange(8)[None] < torch.tensor([8, 5, 1, 3, 0])[:, None]
    result = gae(GAEInputs.from_rows(outcome_rewards(reward, mask), values_, mask), gamma=1.0, lam=1.0)
    assert torch.allclose(result.advantages, torch.where(mask, reward[:, None] - values_, 0.0))
    assert torch.allclose(result.returns, torch.where(mask, reward[:, None], 0.0))


def test_the_outcome_stands_on_the_last_step_that_exists() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    assert outcome_rewards(torch.tensor([3.0, 5.0]), mask).tolist() == [[0, 0, 3, 0], [0, 0, 0, 0]]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_masked_tokens_have_no_effect_on_the_others(seed: int, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(1, 9, generator)
    rewards, values_ = normal(1, 9, seed=seed), normal(1, 9, seed=seed + 1)
    poisoned = [torch.where(mask, x, math.nan) for x in (rewards, values_)]
    result = gae(GAEInputs.from_rows(*poisoned, mask), 0.9, lam)
    kept = [x[mask][None] for x in (rewards, values_)]
    alone = gae(GAEInputs.from_rows(*kept, torch.ones_like(kept[0], dtype=torch.bool)), 0.9, lam)
    for have, want in zip(result, alone, strict=True):
        assert torch.equal(have[mask], want[0]) and torch.equal(have[~mask], torch.zeros(int((~mask).sum())).double())


def test_a_truncated_row_continues_with_its_last_value() -> None:
    rewards, values_ = normal(2, 3), normal(2, 3, seed=1)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    last = torch.tensor([7.0, -3.0], dtype=torch.float64)
    result = gae(GAEInputs.from_rows(rewards, values_, mask, last_values=last), 0.9, 0.0)
    assert float(result.advantages[0, 2]) == pytest.approx(float(rewards[0, 2] + 0.9 * 7.0 - values_[0, 2]))
    assert float(result.advantages[1, 1]) == pytest.approx(float(rewards[1, 1] - 0.9 * 3.0 - values_[1, 1]))


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_packed_rows_equal_each_row_alone(lengths: list[int], seed: int) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    rewards, values_ = normal(total, seed=seed), normal(total, seed=seed + 1)
    mask = torch.rand(total, generator=torch.Generator().manual_seed(seed)) > 0.3
    rows = DenseLayout.of(offsets)
    dense = gae(GAEInputs.from_rows(rows.dense(rewards), rows.dense(values_), rows.dense(mask)), 0.9, 0.8)
    for b, length in enumerate(lengths):
        cut = slice(int(offsets[b]), int(offsets[b]) + length)
        alone = gae(GAEInputs.from_rows(rewards[cut][None], values_[cut][None], mask[cut][None]), 0.9, 0.8)
        for have, want in zip(dense, alone, strict=True):
            assert torch.equal(rows.packed(have)[cut], want[0])


@pytest.mark.parametrize("cuts", [[8], [3, 5], [1, 1, 6]])
def test_whitening_gives_mean_zero_and_unbiased_variance_one_for_any_micro_batches(cuts: list[int]) -> None:
    result = 3.0 * normal(8, 5) + 100.0
    mask = random_mask(8, 5, torch.Generator().manual_seed(0))
    result[~mask] = math.nan
    parts = [moments(x, m) for x, m in zip(result.split(cuts), mask.split(cuts), strict=True)]
    white = whitened(result, mask, torch.stack(parts).sum(0))
    assert torch.equal(white[~mask], torch.zeros_like(white[~mask]))
    kept = white[mask]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-9) and float(kept.var()) == pytest.approx(1.0, rel=1e-6)
    oracle = (result[mask] - result[mask].mean()) * torch.rsqrt(result[mask].var() + 1e-8)
    assert torch.allclose(kept, oracle)


def test_whitening_one_element_or_equal_ones_gives_zero() -> None:
    for result in (torch.tensor([[4.0]]), torch.full((2, 3), 0.1)):
        mask = torch.ones_like(result, dtype=torch.bool)
        assert float(whitened(result, mask, moments(result, mask)).abs().max()) < 1e-3


def test_the_value_loss_has_its_published_value() -> None:
    result = value_loss(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.0), clip=0.2)
    assert float(result) == 2.0  # max(4, 1.44) / 2


@pytest.mark.parametrize(
    ("value", "old", "target", "slope"),
    [
        (1.1, 1.0, 2.0, -0.9),  # inside the clip: the error's own gradient
        (1.5, 1.0, 2.0, 0.0),  # moved too far towards the target: the clipped error is larger, and constant
        (0.5, 1.0, 2.0, -1.5),  # moved too far away: the plain error is larger
        (1.5, 1.0, 1.3, 0.2),  # beyond the clip and the target: back
    ],
)
def test_the_value_clip_stops_values_that_moved_to_the_target_and_no_others(
    value: float, old: float, target: float, slope: float
) -> None:
    v = torch.tensor(value, requires_grad=True)
    returns = torch.tensor(target, requires_grad=True)
    old_ = torch.tensor(old, requires_grad=True)
    value_loss(v, old_, returns, clip=0.2).backward()
    assert float(v.grad) == pytest.approx(slope, abs=1e-6)
    assert returns.grad is None and old_.grad is None


def test_without_movement_or_without_clip_it_is_half_the_squared_error() -> None:
    v = normal(20).requires_grad_()
    returns = normal(20, seed=1)
    for result in (value_loss(v, v.detach(), returns, clip=0.2), value_loss(v, returns, returns, clip=None)):
        assert torch.allclose(result, 0.5 * (v - returns).square())
        (grad,) = torch.autograd.grad(result.sum(), v)
        assert torch.allclose(grad, (v - returns).detach())


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_huber_loss_is_that_of_torch(clip: float | None) -> None:
    v, old, returns = normal(200).requires_grad_(), normal(200, seed=1), normal(200, seed=2)
    result = value_loss(v, old, returns, clip, huber=0.7)
    expected = huber_loss(v, returns, reduction="none", delta=0.7)
    if clip is not None:
        clipped = torch.minimum(torch.maximum(v, old - clip), old + clip)
        expected = torch.maximum(expected, huber_loss(clipped, returns, reduction="none", delta=0.7))
    assert torch.allclose(result, expected, rtol=1e-12)
    slope, wanted = (torch.autograd.grad(loss.sum(), v)[0] for loss in (result, expected))
    assert torch.allclose(slope, wanted, rtol=1e-12) and float(slope.abs().max()) == pytest.approx(0.7)


def test_explained_variance_follows_from_the_metrics_of_any_micro_batches() -> None:
    returns, values_ = normal(12, 4).float(), normal(12, 4, seed=1).float()
    values_ = returns + 0.5 * values_ + 3.0  # a constant error is no loss of explained variance
    weights = torch.ones(12, 4)
    weights[5] = 0.0
    values_[5], returns[5] = math.nan, math.inf
    losses = value_loss(values_, values_, returns)
    cuts = [slice(0, 3), slice(3, 12)]
    result = values(merge(value_metrics(values_[c], returns[c], losses[c], weights[c]) for c in cuts))
    kept = [i for i in range(12) if i != 5]
    explained = 1 - (returns - values_)[kept].var() / returns[kept].var()
    share = 1 - (result["train/value_error_std"] / result["train/return_std"]) ** 2
    assert share == pytest.approx(float(explained), abs=1e-4)
    assert result["train/value_loss"] == pytest.approx(float(losses[kept].mean()), rel=1e-5)


def test_explained_variance_equals_the_textbook_and_is_absent_without_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(50, generator=generator, dtype=torch.float64)
    values_ = returns + 0.5 * torch.randn(50, generator=generator, dtype=torch.float64)
    weights = torch.ones(50, dtype=torch.float64)
    pieces = zip(values_.split(7), returns.split(7), weights.split(7), strict=True)
    parts = [value_metrics(v, r, r, w) for v, r, w in pieces]
    result = explained_variance(values(merge(parts)))
    want = 1 - float((returns - values_).var(correction=0) / returns.var(correction=0))
    assert result == {"train/explained_variance": pytest.approx(want)}
    flat = value_metrics(values_, torch.ones(50, dtype=torch.float64), returns, weights)
    assert explained_variance(values(flat)) == {} and explained_variance({}) == {}
