"""Divergences against exact sums over a small distribution, torch's own, and goldens of the adaptive coefficient."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from unirl.algorithms.shared.kl import AdaptiveKL, KLController, KLEstimator, gaussian_kl, k1, k2, k3, kl_estimate
from unirl.config.errors import ConfigError
from unirl.types.protocols import Stateful

P, Q = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
DRAWS = torch.Generator().manual_seed(0)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize(
    ("name", "expected"), [("k1", 0.0252672), ("k2", 0.0248624), ("k3", 0.0252672), ("k3+", 0.0252672)]
)
def test_estimates_have_the_published_means_on_three_categories(name: KLEstimator, expected: float) -> None:
    assert float((P * kl_estimate(name, (P / Q).log())).sum()) == pytest.approx(expected, abs=1e-7)
    assert float(divergence(P, Q)) == pytest.approx(0.0252672, abs=1e-7)


def mean_gradient(name: KLEstimator) -> Tensor:
    """E over samples of pi of the gradient that an estimate has in pi's logits: what a loss on samples sees."""
    logits = P.log().requires_grad_()
    log_ratio = logits.log_softmax(0) - Q.log()
    return torch.autograd.grad((P * kl_estimate(name, log_ratio)).sum(), logits)[0]


def exact_gradient(forward: bool) -> Tensor:
    logits = P.log().requires_grad_()
    p = logits.softmax(0)
    return torch.autograd.grad(divergence(p, Q) if forward else divergence(Q, p), logits)[0]


def test_as_a_loss_k1_has_no_gradient_k2_descends_the_kl_and_k3_the_reverse_kl() -> None:
    forward, reverse = exact_gradient(forward=True), exact_gradient(forward=False)
    assert not torch.allclose(forward, reverse, atol=1e-3)
    assert torch.allclose(mean_gradient("k1"), torch.zeros(3, dtype=torch.float64), atol=1e-15)
    assert torch.allclose(mean_gradient("k2"), forward, atol=1e-15)
    assert torch.allclose(mean_gradient("k3"), reverse, atol=1e-15)
    assert torch.allclose(mean_gradient("k3+"), forward, atol=1e-15)


@given(st.floats(-30, 30))
@settings(deadline=None)
def test_k3_is_never_negative_and_zero_only_where_the_policies_agree(d: float) -> None:
    value = float(k3(torch.tensor(d, dtype=torch.float64)))
    assert value >= 0.0 and (value > 0.0 or abs(d) < 1e-7)
    assert value == pytest.approx(math.exp(-d) - 1 + d, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3+"])
def test_one_outlier_token_is_bounded_in_value_and_gradient(name: KLEstimator) -> None:
    wild = torch.tensor([-1e4, -21.0, 21.0, 1e4], requires_grad=True)
    value = kl_estimate(name, wild)
    ends = {"k1": [-20.0, 20.0], "k2": [200.0, 200.0], "k3": [10.0, 10.0], "k3+": [10.0, 10.0]}[name]
    assert value.tolist() == [ends[0], ends[0], ends[1], ends[1]]
    assert torch.autograd.grad(value.sum(), wild)[0].tolist() == [0.0] * 4


def test_inside_the_bounds_an_estimate_is_the_plain_formula() -> None:
    d = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64)
    for name, formula in (("k1", k1), ("k2", k2), ("k3", k3), ("k3+", k3)):
        assert torch.allclose(kl_estimate(name, d), formula(d), rtol=0, atol=1e-15)
    assert torch.allclose(k2(d), d**2 / 2) and torch.equal(k1(d), d)


@pytest.mark.parametrize("latent", [(3, 4, 5), (3, 2, 4, 5)], ids=["image", "video"])
def test_the_kl_of_steps_is_the_mean_of_torchs_and_zero_for_equal_means(latent: tuple[int, ...]) -> None:
    mean, other = torch.randn(2, 6, 3, *latent, dtype=torch.float64, generator=DRAWS)
    std = torch.tensor([0.7, 0.3, 0.05], dtype=torch.float64)
    wide = std.view(-1, *[1] * len(latent))
    expected = kl_divergence(Normal(mean, wide), Normal(other, wide)).flatten(2).mean(2)
    assert torch.allclose(gaussian_kl(mean, other, std), expected, rtol=1e-12)
    assert torch.equal(gaussian_kl(mean, mean, std), torch.zeros(6, 3, dtype=torch.float64))


def test_a_rows_kl_has_the_same_bits_alone_and_in_a_batch() -> None:
    mean, other = torch.randn(2, 7, 2, 40_000, generator=DRAWS)
    std = torch.tensor([0.7, 0.2])
    together = gaussian_kl(mean, other, std)
    assert all(torch.equal(gaussian_kl(mean[b : b + 1], other[b : b + 1], std)[0], together[b]) for b in range(7))


# --- the adaptive coefficient ----------------------------------------------------------------------------------------


def test_the_coefficient_follows_the_published_rule() -> None:
    rule = AdaptiveKL(target=6.0, horizon=10_000)
    assert 0.2 * rule.factor(12.0, 256) == pytest.approx(0.201024, abs=1e-12)
    assert 0.2 * rule.factor(0.0, 256) == pytest.approx(0.198976, abs=1e-12)
    assert rule.factor(6.0, 256) == 1.0
    assert rule.factor(6.6, 1000) == pytest.approx(1 + 0.1 * 0.1)  # inside the bound the error acts as it is


def test_feedback_holds_the_kl_at_its_target() -> None:
    controller = KLController(AdaptiveKL(target=1e-3, horizon=1000))
    for _ in range(400):
        controller.observe(4e-3 / controller.scale, 96)
    assert controller.scale == pytest.approx(4.0, rel=1e-2)


def test_a_controller_that_is_saved_and_loaded_continues_unchanged() -> None:
    rule = AdaptiveKL(target=1e-3, horizon=1000)
    one = KLController(rule)
    assert isinstance(one, Stateful) and one.scale == 1.0
    one.observe(5e-3, 96)
    other = KLController(rule)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for controller in (one, other):
        controller.observe(2e-4, 96)
    assert other.scale == one.scale != 1.0


@pytest.mark.parametrize("options", [{"target": 0.0}, {"target": 1e-3, "horizon": -1.0}, {"target": 1, "max_error": 0}])
def test_settings_of_the_controller_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="kl_adaptive") as error:
        AdaptiveKL(**options)
    assert error.value.code == 2004
