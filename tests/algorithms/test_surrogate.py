"""The clipped surrogate against its closed form, quadrant by quadrant."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.algorithms.shared.kl import k2
from unirl.algorithms.shared.surrogate import (
    clip_fractions,
    clip_scale,
    clipped_surrogate,
    element_metrics,
    guard_log_ratio,
    masked_surrogate,
    spread_metrics,
    weighted_sum,
)
from unirl.types.results import merge, values

LOW, HIGH = 0.1, 0.2


def gradient(log_ratio: float, advantage: float, dual_clip: float | None = None) -> float:
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    clipped_surrogate(x, torch.tensor([[advantage]], dtype=torch.float64), LOW, HIGH, dual_clip).sum().backward()
    return float(x.grad)


@pytest.mark.parametrize("advantage", [1.7, -0.3])
def test_gradient_at_ratio_one_is_exactly_minus_the_advantage(advantage: float) -> None:
    assert gradient(0.0, advantage) == -advantage


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "clipped"),
    [
        (2.0, math.log(1 + HIGH) + 0.01, True),
        (2.0, math.log(1 - LOW) - 0.01, False),
        (-2.0, math.log(1 + HIGH) + 0.01, False),
        (-2.0, math.log(1 - LOW) - 0.01, True),
        (2.0, math.log(1 + HIGH) - 0.01, False),
        (-2.0, math.log(1 - LOW) + 0.01, False),
    ],
)
def test_each_quadrant_has_a_gradient_in_the_corrective_direction_only(
    advantage: float, log_ratio: float, clipped: bool
) -> None:
    expected = 0.0 if clipped else -advantage * math.exp(log_ratio)
    assert gradient(log_ratio, advantage) == pytest.approx(expected, abs=1e-15)


@settings(deadline=None)
@given(log_ratio=st.floats(-1, 1), advantage=st.floats(-5, 5), low=st.floats(1e-6, 0.9), high=st.floats(1e-6, 0.9))
def test_value_is_minus_the_smaller_of_clipped_and_unclipped_gain(
    log_ratio: float, advantage: float, low: float, high: float
) -> None:
    ratio = math.exp(log_ratio)
    expected = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    got = clipped_surrogate(
        torch.tensor([[log_ratio]], dtype=torch.float64), torch.tensor([[advantage]], dtype=torch.float64), low, high
    )
    assert float(got) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (-1.0, 5.0, 3.0, 0.0),  # beyond c: bounded, no gradient
        (-2.0, 5.0, 6.0, 0.0),
        (-1.0, 2.9, 2.9, 2.9),  # within c: as without it
        (-1.0, 1 - LOW - 0.05, 1 - LOW, 0.0),
        (-1.0, 1.0, 1.0, 1.0),
        (1.0, 5.0, -(1 + HIGH), 0.0),  # a good sample is clipped as ever
        (1.0, 0.5, -0.5, -0.5),
    ],
)
def test_a_dual_clip_of_three_bounds_the_loss_of_bad_samples_only(
    advantage: float, ratio: float, loss: float, slope: float
) -> None:
    given = torch.tensor([[ratio]], dtype=torch.float64).log()
    result = clipped_surrogate(given, torch.full_like(given, advantage), LOW, HIGH, 3.0)
    assert float(result) == pytest.approx(loss)
    assert gradient(math.log(ratio), advantage, 3.0) == pytest.approx(slope, abs=1e-15)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_an_overflowing_ratio_gives_a_finite_loss_and_gradient(dual_clip: float | None) -> None:
    log_ratio = torch.tensor([[-1e6, -1e3, 1e3, 1e6]], requires_grad=True)
    for sign in (-1.0, 1.0):
        losses = clipped_surrogate(log_ratio, torch.full((1, 4), sign), LOW, HIGH, dual_clip)
        (result,) = torch.autograd.grad(losses.sum(), log_ratio)
        assert losses.isfinite().all() and result.isfinite().all()


def masked_gradient(log_ratio: float, advantage: float, divergence: float, threshold: float) -> float:
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    advantages = torch.full_like(x, advantage)
    masked_surrogate(x, advantages, torch.full_like(x, divergence), threshold)[0].sum().backward()
    return float(x.grad)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "away"),
    [(2.0, 0.3, True), (2.0, -0.3, False), (-2.0, 0.3, False), (-2.0, -0.3, True), (2.0, 0.0, False)],
)
def test_beyond_the_divergence_threshold_only_steps_back_towards_the_old_policy_are_kept(
    advantage: float, log_ratio: float, away: bool
) -> None:
    plain = -advantage * math.exp(log_ratio)
    for divergence, threshold in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.0), (0.0, 0.0)):  # at the threshold it acts already
        assert masked_gradient(log_ratio, advantage, divergence, threshold) == (0.0 if away else plain)
    for divergence, threshold in ((0.5, 1.0), (1e9, math.inf)):
        assert masked_gradient(log_ratio, advantage, divergence, threshold) == pytest.approx(plain)


def test_a_dropped_ratio_may_be_infinite() -> None:
    log_ratio = torch.tensor([[1e4, torch.inf, 0.1]], requires_grad=True)
    losses, dropped = masked_surrogate(log_ratio, torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]]), 1e-5)
    losses.sum().backward()
    assert dropped.tolist() == [[True, True, False]]
    assert losses[0, :2].tolist() == [0.0, 0.0] and log_ratio.grad[0, :2].tolist() == [0.0, 0.0]
    assert float(log_ratio.grad[0, 2]) == pytest.approx(-math.exp(0.1))


def test_no_gradient_reaches_advantages_or_the_divergence_of_a_mask() -> None:
    advantages, divergence = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    assert not masked_surrogate(torch.zeros(1, 1), advantages, divergence, 0.5)[0].requires_grad


LATENTS = pytest.mark.parametrize("latent", [(3, 4, 5), (3, 2, 4, 5)], ids=["image", "video"])


@LATENTS
def test_log_ratios_of_steps_have_their_closed_forms(latent: tuple[int, ...]) -> None:
    # With z = (x' - mean_old) / std and delta = mean - mean_old, averaged over latent elements:
    # log r = mean(z delta) / std - mean(delta^2) / (2 std^2), and Guard's is mean(z delta) = std (log r + KL).
    draws = torch.randn(3, 5, 2, *latent, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x_next, old_mean, delta = draws[0], draws[1], 0.1 * draws[2]
    std = torch.tensor([0.7, 0.2], dtype=torch.float64)
    wide = std.view(-1, *[1] * len(latent))

    def logp(mean: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(mean, wide).log_prob(x_next).flatten(2).mean(2)

    log_ratio, z = logp(old_mean + delta) - logp(old_mean), (x_next - old_mean) / wide
    kl = (delta**2 / (2 * wide**2)).flatten(2).mean(2)
    guard = guard_log_ratio(x_next, old_mean + delta, old_mean, std)
    assert torch.allclose(log_ratio, (z * delta).flatten(2).mean(2) / std - kl, atol=1e-12)
    assert torch.allclose(guard, std * (log_ratio + kl), atol=1e-12)
    assert torch.equal(guard_log_ratio(x_next, old_mean, old_mean, std), torch.zeros_like(guard))


def test_the_plain_log_ratio_drifts_below_zero_by_the_kl_and_guards_does_not() -> None:
    generator = torch.Generator().manual_seed(3)
    old_mean = torch.zeros(200_000, 1, 2, dtype=torch.float64)
    mean, std = old_mean + torch.tensor([0.2, -0.1]), torch.tensor([0.5], dtype=torch.float64)
    x_next = old_mean + std * torch.randn(old_mean.shape, dtype=torch.float64, generator=generator)
    normal = torch.distributions.Normal
    log_ratio = (normal(mean, 0.5).log_prob(x_next) - normal(old_mean, 0.5).log_prob(x_next)).mean(2)
    assert float(log_ratio.mean()) == pytest.approx(-(0.2**2 + 0.1**2) / 2 / (2 * 0.25), rel=0.05)
    assert float(guard_log_ratio(x_next, mean, old_mean, std).mean()) == pytest.approx(0.0, abs=1e-3)


def test_a_clip_range_of_one_millionth_acts_in_float32() -> None:
    log_ratio = torch.tensor([[0.8e-6, 1.2e-6]], requires_grad=True)
    clipped_surrogate(log_ratio, torch.ones(1, 2), 1e-6, 1e-6).sum().backward()
    assert log_ratio.grad[0, 1] == 0 and log_ratio.grad[0, 0] == pytest.approx(-1, rel=1e-5)


def test_advantages_get_no_gradient() -> None:
    advantages = torch.ones(1, 1, requires_grad=True)
    assert not clipped_surrogate(torch.zeros(1, 1), advantages, LOW, HIGH).requires_grad


def test_clip_schedules_have_their_published_ends() -> None:
    assert [clip_scale("constant", p) for p in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]
    assert [clip_scale("linear", p) for p in (0.0, 0.5, 1.0)] == [1.0, 0.75, 0.5]
    assert [clip_scale("cosine", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-15)
    with pytest.raises(ValueError, match="progress"):
        clip_scale("linear", 1.1)


def test_approx_kl_of_a_gaussian_shift_matches_the_exact_kl_to_first_order() -> None:
    # Two unit normals a small d apart: E_old[log_ratio^2] / 2 = d^2 / 2 + O(d^4) = KL.
    shift, x = 1e-2, torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normal = torch.distributions.Normal
    log_ratio = normal(shift, 1.0).log_prob(x) - normal(0.0, 1.0).log_prob(x)
    exact = torch.distributions.kl_divergence(normal(0.0, 1.0), normal(torch.tensor(shift), 1.0))
    assert float(k2(log_ratio).mean()) == pytest.approx(float(exact), rel=1e-2)


def test_ratio_statistics_use_elements_of_positive_weight_for_any_split() -> None:
    generator = torch.Generator().manual_seed(1)
    log_ratio = 1e-4 * torch.randn(6, 5, generator=generator)
    weights = torch.ones(6, 5)
    weights[2] = 0
    log_ratio[2] = torch.nan
    above, below = log_ratio > math.log1p(5e-5), log_ratio < math.log1p(-1e-4)
    parts = [
        spread_metrics(log_ratio[rows], weights[rows], clip_fractions(above[rows], below[rows]))
        for rows in (slice(0, 2), slice(2, 6))
    ]
    result = values(merge(parts))
    kept = log_ratio[[0, 1, 3, 4, 5]].double()
    ratio = kept.exp()
    assert result["train/ratio_mean"] == pytest.approx(float(ratio.mean()), abs=1e-7)
    assert result["train/ratio_std"] == pytest.approx(float(ratio.std(correction=0)), rel=1e-4)
    assert result["train/approx_kl"] == pytest.approx(float((kept**2).mean() / 2), rel=1e-4)
    assert result["train/clip_fraction_high"] == pytest.approx(float((ratio > 1 + 5e-5).double().mean()))
    assert result["train/clip_fraction_low"] == pytest.approx(float((ratio < 1 - 1e-4).double().mean()))
    assert result["train/clip_fraction"] == pytest.approx(
        result["train/clip_fraction_high"] + result["train/clip_fraction_low"]
    )


def test_metrics_of_one_pass_are_the_weighted_moments_of_each_value() -> None:
    generator = torch.Generator().manual_seed(2)
    first, second, third = torch.randn(3, 4, 5, generator=generator).double()
    weights = torch.rand(4, 5, generator=generator).double()
    weights[1], first[1], third[1] = 0.0, torch.nan, torch.inf
    result = values(element_metrics({"mean": first, "share": second > 0}, {"std": third}, weights))
    kept = [0, 2, 3]
    share = weights[kept] / weights.sum()
    center = (share * third[kept]).sum()
    assert result == pytest.approx(
        {
            "mean": float((share * first[kept]).sum()),
            "share": float((share * (second[kept] > 0)).sum()),
            "std": float((share * (third[kept] - center) ** 2).sum().sqrt()),
        },
        rel=1e-12,
    )


def test_an_element_of_weight_zero_has_no_effect_even_if_it_is_nan() -> None:
    values_, weights = torch.tensor([[1.0, torch.nan], [3.0, torch.inf]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert float(weighted_sum(values_, weights)) == 7.0
