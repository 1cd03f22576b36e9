"""The Gaussian of a step against torch.distributions, and closed forms of log-ratios."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from unirl.sde.gaussian import Gaussian, UnnormalisedGaussian
from unirl.sde.kernels import CPSSDEStrategy, EulerODE, FlowSDEStrategy


def normals(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


STDS = [torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.3, 0.7, 1.5], dtype=torch.float64)]


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_log_prob_is_the_mean_of_torch_normal(std, dtype, tolerance):
    mean, x_next, std = normals(3, 4, 5, 2, dtype=dtype), normals(3, 4, 5, 2, seed=1, dtype=dtype), std.to(dtype)
    rows = std if std.dim() == 0 else std[:, None, None, None]
    expected = Normal(mean, rows).log_prob(x_next).flatten(1).mean(1)
    result = Gaussian(mean, std).log_prob(x_next)
    assert result.shape == (3,) and result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_expected_log_prob_is_minus_the_entropy():
    step = Gaussian(normals(1, 400_000), torch.tensor(0.4, dtype=torch.float64))
    result = step.log_prob(step.sample(normals(1, 400_000, seed=1))).item()
    assert result == pytest.approx(-0.5 - math.log(0.4) - 0.5 * math.log(2 * math.pi), abs=0.01)


def test_log_prob_does_not_see_the_gradient_of_x_next():
    mean = normals(2, 8).requires_grad_()
    step = Gaussian(mean, torch.tensor(0.5, dtype=torch.float64))
    x_next = step.sample(normals(2, 8, seed=1))
    x_next.retain_grad()
    step.log_prob(x_next).sum().backward()
    assert x_next.grad is None
    torch.testing.assert_close(mean.grad, (x_next.detach() - mean.detach()) / 0.25 / 8)


def test_log_ratio_is_the_closed_form():
    std, mean, noise = torch.tensor(0.6, dtype=torch.float64), normals(3, 50), normals(3, 50, seed=1)
    drift = 1e-2 * normals(3, 50, seed=2)
    old, new = Gaussian(mean, std), Gaussian(mean + drift, std)
    x_next = old.sample(noise)
    expected = (noise * drift).mean(1) / std - drift.square().mean(1) / (2 * std**2)
    torch.testing.assert_close(new.log_prob(x_next) - old.log_prob(x_next), expected, rtol=0, atol=1e-13)


def test_log_ratio_is_left_of_zero_by_the_kl_on_average():
    std, size = torch.tensor(0.6, dtype=torch.float64), 400_000
    old = Gaussian(torch.zeros(1, size, dtype=torch.float64), std)
    new = Gaussian(old.mean + 0.3, std)
    x_next = old.sample(normals(1, size))
    result = (new.log_prob(x_next) - old.log_prob(x_next)).item()
    assert result == pytest.approx(-(0.3**2) / (2 * 0.6**2), abs=3e-3)
    assert result == pytest.approx(-old.kl(new).item(), abs=3e-3)


def test_unnormalised_log_ratio_is_the_closed_form_of_cps():
    std, mean, noise = torch.tensor(0.6, dtype=torch.float64), normals(3, 50), normals(3, 50, seed=1)
    drift = 1e-2 * normals(3, 50, seed=2)
    old, new = UnnormalisedGaussian(mean, std), UnnormalisedGaussian(mean + drift, std)
    x_next = old.sample(noise)
    torch.testing.assert_close(old.log_prob(x_next), -(x_next - mean).square().mean(1))
    expected = 2 * (std * noise * drift).mean(1) - drift.square().mean(1)
    torch.testing.assert_close(new.log_prob(x_next) - old.log_prob(x_next), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("form", "kind"), [("gaussian", Gaussian), ("unnormalised", UnnormalisedGaussian)])
def test_cps_gives_the_log_prob_that_was_asked_for(form, kind):
    assert type(CPSSDEStrategy(log_prob_form=form).transition(normals(1, 4), normals(1, 4), 0.5, 0.4)) is kind


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("other_std", STDS)
def test_kl_is_the_mean_of_torch_kl(std, other_std):
    def rows(values):
        return values if values.dim() == 0 else values[:, None]

    one, two, far = normals(3, 40), normals(3, 40, seed=1), other_std * 1.7
    expected = kl_divergence(Normal(one, rows(std)), Normal(two, rows(far))).mean(1)
    torch.testing.assert_close(Gaussian(one, std).kl(Gaussian(two, far)), expected)


def test_kl_of_equal_distributions_is_exactly_zero():
    step = Gaussian(normals(3, 40, dtype=torch.float32), torch.tensor([0.1, 0.3, 0.7]))
    assert torch.equal(step.kl(step), torch.zeros(3))


def test_kl_of_a_tiny_drift_survives_float32():
    mean, std = torch.zeros(1, 1000), torch.tensor(0.7)
    result = Gaussian(mean, std).kl(Gaussian(mean + 1e-5, std)).item()
    assert result == pytest.approx(1e-10 / (2 * 0.49), rel=1e-5)


@pytest.mark.parametrize("std", [torch.tensor(0.0), torch.tensor([0.5, 0.0])])
def test_a_step_without_noise_has_no_density(std):
    still, other = Gaussian(torch.zeros(2, 3), std), Gaussian(torch.zeros(2, 3), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"log_prob of a step with std=0: a step without noise has no density"):
        still.log_prob(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"kl of a step with std=0"):
        still.kl(other)
    with pytest.raises(ValueError, match=r"kl of a step with std=0"):
        other.kl(still)


def test_euler_and_the_last_cps_step_have_no_density():
    x, v = normals(2, 2, 3)
    for step in (EulerODE().transition(x, v, 0.5, 0.4), CPSSDEStrategy().transition(x, v, 0.1, 0.0)):
        assert torch.equal(step.sample(normals(2, 3, seed=3)), step.mean)
        with pytest.raises(ValueError, match="no density"):
            step.log_prob(x)


def test_a_known_density_is_not_read_back_from_the_device():
    step = FlowSDEStrategy().transition(normals(2, 3), normals(2, 3), 0.5, 0.4)
    assert step.dense


def test_x_next_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"x_next \(1, 3\) must have the mean's shape \(2, 3\)"):
        Gaussian(torch.zeros(2, 3), torch.tensor(1.0)).log_prob(torch.zeros(1, 3))
