"""What kernels do to whole trajectories on data whose exact predictions are known: propagated in closed form."""

import math
from itertools import pairwise

import pytest
import torch

from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, EulerODE, FlowDDIM, FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.testing.kernels import mean_weights

MEAN, STD = 0.7, 0.5
KERNELS = [EulerODE(), FlowSDEStrategy(), DanceSDEStrategy(), CPSSDEStrategy(), FlowDDIM()]


def numbers(text):
    return [float(word) for word in text.split()]


def levels(num_steps, shift=3.0):
    return [shift * tau / (1 + (shift - 1) * tau) for tau in (1 - i / num_steps for i in range(num_steps + 1))]


def inside(num_steps):
    # Flow-SDE's noise is singular at 1, where its error does not fall with the step.
    return [0.9 - 0.85 * i / num_steps for i in range(num_steps + 1)]


def target(sigma):
    return (1 - sigma) * MEAN, (1 - sigma) ** 2 * STD**2 + sigma**2


def moments(kernel, sigmas):
    """(mean, variance) of x at each level but the first, from the exact ones there, under exact predictions."""
    (mean, variance), trace = target(sigmas[0]), []
    for sigma, sigma_next in pairwise(sigmas):
        a, b, std = mean_weights(kernel, sigma, sigma_next)
        exact_mean, exact_variance = target(sigma)
        to_x0 = (1 - sigma) * STD**2 / exact_variance
        to_noise = sigma / exact_variance
        centred = mean - exact_mean
        mean = a * mean + b * (to_noise * centred - MEAN - to_x0 * centred)
        variance = (a + b * (to_noise - to_x0)) ** 2 * variance + std**2
        trace.append((mean, variance))
    return trace


def worst_variance(kernel, sigmas, highest=1.0):
    result = [variance for _, variance in moments(kernel, sigmas)]
    return max(abs(v - target(sigma)[1]) for v, sigma in zip(result, sigmas[1:], strict=True) if sigma <= highest)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("num_steps", [1, 4, 10, 40])
def test_the_mean_is_exact_for_every_kernel_at_any_number_of_steps(kernel, num_steps):
    sigmas = levels(num_steps)
    for (mean, _), sigma in zip(moments(kernel, sigmas), sigmas[1:], strict=True):
        assert mean == pytest.approx((1 - sigma) * MEAN, abs=1e-12)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (
            EulerODE(),
            numbers("0.929847 0.852801 0.768180 0.675449 0.574507 0.466283 0.354004 0.245874 0.160400 0.136672"),
        ),
        (
            FlowSDEStrategy(eta=0.7),
            numbers("1.007372 0.990159 0.890512 0.780703 0.664249 0.542274 0.417973 0.299598 0.205800 0.180080"),
        ),
        (
            DanceSDEStrategy(eta=0.3),
            numbers("0.929964 0.853071 0.768650 0.676195 0.575645 0.468003 0.356636 0.250018 0.167171 0.148362"),
        ),
        (
            CPSSDEStrategy(eta=0.8),
            numbers("0.929847 0.852422 0.766813 0.672169 0.567910 0.454244 0.333466 0.213302 0.116142 0.098961"),
        ),
    ],
)
def test_variances_on_the_sd3_schedule_are_the_published_ones(kernel, expected):
    assert [variance for _, variance in moments(kernel, levels(10))] == pytest.approx(expected, abs=1.1e-6)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (EulerODE(), [2.5e-2, 1.3e-2, 6.5e-3, 3.3e-3, 1.6e-3]),
        (FlowSDEStrategy(eta=0.7), [2.6e-2, 1.1e-2, 5.1e-3, 2.5e-3, 1.2e-3]),
        (FlowSDEStrategy(eta=1.2), [1.2e-1, 4.6e-2, 2.1e-2, 9.7e-3, 4.7e-3]),
        (DanceSDEStrategy(eta=0.3), [2.1e-2, 1.1e-2, 5.5e-3, 2.8e-3, 1.4e-3]),
        (FlowDDIM(eta=1.0), None),
    ],
)
def test_marginals_are_preserved_to_first_order(kernel, expected):
    result = [worst_variance(kernel, inside(num_steps)) for num_steps in (20, 40, 80, 160, 320)]
    assert all(fine < 0.56 * coarse for coarse, fine in pairwise(result))
    assert expected is None or result == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("kernel", [EulerODE(), DanceSDEStrategy(eta=0.3)], ids=str)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_from_pure_noise_on_the_ode_and_dance_preserve_marginals_to_first_order(kernel, shift):
    result = [worst_variance(kernel, levels(num_steps, shift)) for num_steps in (20, 40, 80, 160, 320)]
    assert all(fine < 0.56 * coarse for coarse, fine in pairwise(result))


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.5, 0.7, 1.0])
def test_from_pure_noise_on_flow_sde_forgets_its_singular_start_by_a_power_of_the_steps(eta):
    """Near 1 it stays wrong for any T, below it decays like T^(-eta^2), and the end of the trajectory is right."""
    coarse, fine = (levels(num_steps) for num_steps in (640, 1280))
    kernel = FlowSDEStrategy(eta=eta)
    anywhere = [worst_variance(kernel, sigmas) for sigmas in (coarse, fine)]
    assert anywhere[1] == pytest.approx(anywhere[0], rel=0.01) and anywhere[1] > 0.02
    below = [worst_variance(kernel, sigmas, highest=0.8) for sigmas in (coarse, fine)]
    assert below[1] / below[0] == pytest.approx(2 ** -(eta**2), rel=0.15)
    assert moments(kernel, fine)[-1][1] == pytest.approx(STD**2, abs=1e-3)


def test_the_error_of_flow_sde_near_pure_noise_is_the_published_one():
    assert worst_variance(FlowSDEStrategy(eta=0.7), levels(1280)) == pytest.approx(0.09, abs=0.005)


@pytest.mark.parametrize(("eta", "limit"), [(0.8, 0.162), (0.5, 0.212)])
def test_cps_does_not_preserve_marginals(eta, limit):
    _, variance = moments(CPSSDEStrategy(eta=eta), levels(1000, shift=1.0))[-1]
    assert variance == pytest.approx(limit, abs=5e-4)
    assert STD**2 - variance > 0.03


@pytest.mark.parametrize("kernel", [CPSSDEStrategy(eta=0.8), FlowDDIM(eta=1.0), FlowDDIM(eta=0.4)], ids=str)
def test_the_noise_around_a_single_picture_is_exact(kernel):
    x0, noise = 0.7, 1.0
    for sigma, sigma_next in pairwise(levels(10)):
        a, b, std = mean_weights(kernel, sigma, sigma_next)
        kept = a * ((1 - sigma) * x0 + sigma * noise) + b * (noise - x0) - (1 - sigma_next) * x0
        assert kept**2 + std**2 == pytest.approx(sigma_next**2, abs=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_constant_velocity_moves_the_end_by_minus_itself(kernel):
    result = sum(end_per_velocity(kernel, 10))
    assert result == pytest.approx(-1.0, abs=1e-12)


def end_per_velocity(kernel, num_steps):
    """d E[x at 0] / d v at each step: b_i times the a_j of the steps after it."""
    weights = [mean_weights(kernel, *step)[:2] for step in pairwise(levels(num_steps))]
    return [b * math.prod(a for a, _ in weights[i + 1 :]) for i, (_, b) in enumerate(weights)]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (FlowSDEStrategy(eta=0.7), numbers("-0.0219 -0.0512 -0.0837 -0.1373 -0.2389 -0.4669")),
        (DanceSDEStrategy(eta=0.3), numbers("-0.0576 -0.0746 -0.1004 -0.1429 -0.2213 -0.4031")),
        (CPSSDEStrategy(eta=0.8), numbers("-0.0053 -0.0245 -0.0786 -0.1879 -0.3286 -0.3750")),
    ],
)
def test_policy_gradient_of_each_step_is_the_published_one(kernel, expected):
    assert end_per_velocity(kernel, 6) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(
    ("kernel", "reached"), [(FlowSDEStrategy(), 6), (DanceSDEStrategy(), 6), (CPSSDEStrategy(), 5)], ids=str
)
def test_reinforce_estimates_the_gradient_of_the_end(kernel, reached):
    """E[(x_0 - E[x_0 | x_i]) d log p / d v_i] over two million one-number latents, under a constant velocity.

    The last step of CPS has no noise, so no score reaches it.
    """
    size, velocity, generator = 2_000_000, 0.4, torch.Generator().manual_seed(0)
    steps = list(pairwise(levels(6)))
    weights = [mean_weights(kernel, *step)[:2] for step in steps]
    x, scores, baselines = torch.randn(1, size, generator=generator), [], []
    for i, step in enumerate(steps):
        v = torch.full((1, size), velocity, requires_grad=True)
        result, end = kernel.transition(x, v, *step), x
        for a, b in weights[i:]:
            end = a * end + b * velocity
        x = result.sample(torch.randn(1, size, generator=generator)).detach()
        if result.dense:
            scores += torch.autograd.grad(size * result.log_prob(x).sum(), v)
            baselines.append(end)
    assert x.mean().item() == pytest.approx(-velocity, abs=3e-3)
    estimates = [(score * (x - end)).mean().item() for score, end in zip(scores, baselines, strict=True)]
    assert estimates == pytest.approx(end_per_velocity(kernel, 6)[:reached], abs=1e-3)


def test_float32_levels_of_the_schedule_are_these():
    assert SigmaSchedule(shift=3.0).sigmas(10).tolist() == pytest.approx(levels(10), abs=6e-8)
