"""Kernels against the equations of their papers, and against published tables of their coefficients."""

import math
from itertools import pairwise

import pytest
import torch

from tests.shapes import unchecked
from unirl.sde.kernels import (
    CPSSDEStrategy,
    DanceSDEStrategy,
    EulerODE,
    FlowDDIM,
    FlowSDEStrategy,
    predicted_noise,
    predicted_x0,
)
from unirl.sde.schedule import SigmaSchedule
from unirl.testing.kernels import mean_weights

NOISY = [FlowSDEStrategy(), DanceSDEStrategy(), CPSSDEStrategy(), FlowDDIM()]
SIGMAS = SigmaSchedule(shift=3.0).sigmas(10)
CLEAN = [(3 - 3 * i / 10) / (3 - 2 * i / 10) for i in range(11)]  # 3 tau / (1 + 2 tau) in float64
STEPS = list(pairwise(CLEAN))


def numbers(text):
    return [float(word) for word in text.split()]


def latents(*shape, dtype=torch.float64):
    draws = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return draws[0].to(dtype), draws[1].to(dtype)


def stds(kernel, sigmas):
    x, v = latents(1, 4)
    return [float(kernel.transition(x, v, *step).std) for step in pairwise(sigmas.tolist())]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (FlowSDEStrategy(eta=0.7), numbers("0.7 0.73837 0.53169 0.44146 0.38774 0.35 0.3195 0.29047 0.25617 0.20207")),
        (
            DanceSDEStrategy(eta=0.7),
            numbers("0.13229 0.1421 0.15349 0.16686 0.18278 0.20207 0.22592 0.25617 0.2958 0.35"),
        ),
        (CPSSDEStrategy(eta=0.8), numbers("0.91709 0.8779 0.83217 0.77814 0.71329 0.63404 0.53497 0.4076 0.23776 0.0")),
    ],
)
def test_std_is_the_published_table_on_the_sd3_schedule(kernel, expected):
    assert stds(kernel, SIGMAS) == pytest.approx(expected, abs=6e-6)


def test_flow_sde_std_is_the_published_table_on_the_doubly_shifted_grid():
    sigmas = SigmaSchedule(shift=3.0, grid="diffusers").sigmas(10)
    expected = numbers("0.7 0.74296 0.53615 0.4459 0.39179 0.3528 0.31907 0.28201 0.22536 0.00628")
    assert stds(FlowSDEStrategy(eta=0.7), sigmas) == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize("num_steps", [1, 4, 10, 25, 50])
@pytest.mark.parametrize("eta", [0.25, 0.7, 1.2])
def test_first_std_of_flow_sde_is_eta_for_any_number_of_steps(num_steps, eta):
    sigmas = SigmaSchedule(shift=3.0).sigmas(num_steps)
    assert stds(FlowSDEStrategy(eta=eta), sigmas)[0] == pytest.approx(eta, abs=1e-6)


def test_flow_sde_takes_the_next_level_only_at_exactly_one():
    eta, near, sigma_next = 0.7, 1.0 - 1e-6, 0.9
    _, _, std = mean_weights(FlowSDEStrategy(eta=eta), near, sigma_next)
    assert std == pytest.approx(eta * math.sqrt(near / (1 - near) * (near - sigma_next)), rel=1e-9)


@pytest.mark.parametrize("kernel", [type(kernel)(eta=eta) for kernel in NOISY for eta in (0.0, 9e-8)])
@pytest.mark.parametrize("step", STEPS)
def test_without_noise_every_kernel_is_eulers_step(kernel, step):
    x, v = latents(2, 16)
    result = kernel.transition(x, v, *step)
    torch.testing.assert_close(result.mean, x + v * (step[1] - step[0]), rtol=0, atol=5e-16)
    assert result.std == 0
    with pytest.raises(ValueError, match="no density"):
        result.log_prob(x)


def diffusion(kernel, sigma, sigma_next):
    clean = 1 - (sigma_next if sigma == 1 else sigma)
    return kernel.eta * math.sqrt(sigma / clean) if kernel == FlowSDEStrategy(eta=kernel.eta) else kernel.eta


@pytest.mark.parametrize("kernel", [FlowSDEStrategy(eta=0.7), FlowSDEStrategy(eta=1.2), DanceSDEStrategy(eta=0.3)])
@pytest.mark.parametrize("step", STEPS)
def test_sde_mean_equals_the_three_forms_of_its_sources(kernel, step):
    (sigma, sigma_next), (x, v) = step, latents(2, 16)
    dt, s = sigma_next - sigma, diffusion(kernel, *step)
    mean = kernel.transition(x, v, *step).mean
    flow_grpo = x * (1 + s**2 * dt / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    dance_grpo = x + v * dt - 0.5 * s**2 * score * dt
    drift = x + (v + s**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    for form in (flow_grpo, dance_grpo, drift):
        torch.testing.assert_close(mean, form, rtol=0, atol=1e-12)
    assert kernel.transition(x, v, *step).std.item() == pytest.approx(s * math.sqrt(-dt), rel=1e-12)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
def test_both_forms_of_the_score_are_equal(sigma):
    x, v = latents(2, 16)
    from_noise = -predicted_noise(x, v, sigma) / sigma
    from_x0 = -(x - (1 - sigma) * predicted_x0(x, v, sigma)) / sigma**2
    torch.testing.assert_close(from_noise, from_x0, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", STEPS)
def test_dance_is_flow_sde_with_a_constant_diffusion_coefficient(step):
    flow = FlowSDEStrategy(eta=0.3 / diffusion(FlowSDEStrategy(eta=1.0), *step))
    result, expected = mean_weights(DanceSDEStrategy(eta=0.3), *step), mean_weights(flow, *step)
    assert result == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("kernel", [FlowSDEStrategy(), DanceSDEStrategy(), CPSSDEStrategy(), FlowDDIM(), EulerODE()])
@pytest.mark.parametrize("step", STEPS)
def test_mean_is_the_predicted_x0_and_noise_weighted(kernel, step):
    (sigma, sigma_next), (x, v) = step, latents(2, 16)
    result = kernel.transition(x, v, *step)
    c, std = kernel.coefficients(*step)
    expected = (1 - sigma_next) * predicted_x0(x, v, sigma) + c * predicted_noise(x, v, sigma)
    torch.testing.assert_close(result.mean, expected, rtol=0, atol=1e-12)
    assert result.std.item() == std


@pytest.mark.parametrize("eta", [0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("step", STEPS)
def test_cps_keeps_the_noise_level(eta, step):
    c, std = CPSSDEStrategy(eta=eta).coefficients(*step)
    assert c**2 + std**2 == pytest.approx(step[1] ** 2, abs=1e-15)
    assert std == pytest.approx(step[1] * math.sin(eta * math.pi / 2), abs=1e-15)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (FlowSDEStrategy(eta=0.7), numbers("1.0037 0.9774 0.8965 0.8334 0.7639 0.6817 0.5816 0.4576 0.3094 0.2180")),
        (DanceSDEStrategy(eta=0.3), numbers("0.9643 0.9232 0.8751 0.8184 0.7504 0.6673 0.5638 0.4320 0.2637 0.1566")),
    ],
)
def test_sde_steps_leave_more_noise_than_the_level_they_reach(kernel, expected):
    result = [math.hypot(*kernel.coefficients(*step)) for step in STEPS]
    assert result == pytest.approx(expected, abs=6e-5)
    assert all(noise > sigma_next for noise, (_, sigma_next) in zip(result, STEPS, strict=True))


@pytest.mark.parametrize("step", STEPS[:-1])
def test_ddim_with_eta_one_is_the_exact_posterior(step):
    # Condition the joint Gaussian of (x_next, x) given x0 on x, where x = decay x_next + fresh noise.
    (sigma, sigma_next), (x, v) = step, latents(2, 16)
    x0, decay = x - sigma * v, (1 - sigma) / (1 - sigma_next)
    gain = decay * sigma_next**2 / sigma**2
    result = FlowDDIM(eta=1.0).transition(x, v, *step)
    torch.testing.assert_close(result.mean, (1 - sigma_next) * x0 + gain * (x - (1 - sigma) * x0), rtol=0, atol=1e-12)
    assert result.std.item() ** 2 == pytest.approx(sigma_next**2 - gain * decay * sigma_next**2, rel=1e-9)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (FlowSDEStrategy(eta=0.7), numbers("0.051 0.070 0.113 0.160 0.219 0.296 0.406 0.574 0.868 1.54")),
        (DanceSDEStrategy(eta=0.3), numbers("0.63 0.68 0.73 0.80 0.88 0.98 1.10 1.26 1.49 1.89")),
        (
            CPSSDEStrategy(eta=0.8, log_prob_form="unnormalised"),
            numbers("0.066 0.112 0.157 0.198 0.232 0.252 0.250 0.215 0.132"),
        ),
    ],
)
def test_gradient_of_log_prob_in_v_is_kappa_z_over_the_latent_size(kernel, expected):
    for step, kappa in zip(STEPS, expected, strict=False):
        x, v = latents(1, 16)
        v.requires_grad_()
        z = torch.linspace(-1, 2, 16, dtype=torch.float64)[None]
        result = kernel.transition(x, v, *step)
        result.log_prob(result.sample(z)).sum().backward()
        torch.testing.assert_close(v.grad, v.grad.sum() / z.sum() * z)  # along z
        assert abs(v.grad.sum() / z.sum()).item() * 16 == pytest.approx(kappa, rel=0.012)


def test_kappa_is_the_closed_form():
    (sigma, sigma_next), (x, v) = STEPS[3], latents(1, 16)
    v.requires_grad_()
    s, dt = diffusion(FlowSDEStrategy(), sigma, sigma_next), sigma_next - sigma
    result = FlowSDEStrategy().transition(x, v, sigma, sigma_next)
    result.log_prob(result.sample(torch.ones(1, 16))).sum().backward()
    kappa = -(math.sqrt(-dt) / s + s * math.sqrt(-dt) * (1 - sigma) / (2 * sigma))
    torch.testing.assert_close(v.grad, torch.full((1, 16), kappa / 16, dtype=torch.float64))


@pytest.mark.parametrize("kernel", [*NOISY, EulerODE()])
def test_only_noisy_steps_before_the_last_have_a_density(kernel):
    expected = [kernel != EulerODE()] * 9 + [False]
    assert [kernel.has_density(i, 10) for i in range(10)] == expected


@pytest.mark.parametrize("kind", [FlowSDEStrategy, DanceSDEStrategy, CPSSDEStrategy, FlowDDIM])
def test_a_negligible_eta_has_no_density(kind):
    assert not any(kind(eta=9e-8).has_density(i, 10) for i in range(10))
    assert kind(eta=1.1e-7).has_density(0, 10)


def test_kernels_are_equal_by_value():
    assert FlowSDEStrategy(eta=0.5) == FlowSDEStrategy(eta=0.5) != FlowSDEStrategy(eta=0.7)
    assert FlowSDEStrategy(eta=0.5) != DanceSDEStrategy(eta=0.5)
    assert len({FlowSDEStrategy(), FlowSDEStrategy(), CPSSDEStrategy(), EulerODE(), EulerODE()}) == 3


@pytest.mark.parametrize("kernel", [*NOISY, EulerODE()])
def test_gradients_flow_through_the_mean_to_x_and_v(kernel):
    sigma, sigma_next = STEPS[2]
    x, v = (t.requires_grad_() for t in latents(1, 4))
    kernel.transition(x, v, sigma, sigma_next).mean.sum().backward()
    a, b, _ = mean_weights(kernel, sigma, sigma_next)
    torch.testing.assert_close(x.grad, torch.full_like(x, a))
    torch.testing.assert_close(v.grad, torch.full_like(v, b))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FlowSDEStrategy(eta=-0.1), r"FlowSDEStrategy\.eta=-0\.1 .* within \[0, inf\]"),
        (lambda: FlowSDEStrategy(eta=math.nan), r"FlowSDEStrategy\.eta=nan"),
        (lambda: DanceSDEStrategy(eta=math.inf), r"DanceSDEStrategy\.eta=inf"),
        (lambda: CPSSDEStrategy(eta=1.01), r"CPSSDEStrategy\.eta=1\.01 .* within \[0, 1\]"),
        (lambda: FlowDDIM(eta=2.0), r"FlowDDIM\.eta=2\.0 .* within \[0, 1\]"),
        (lambda: CPSSDEStrategy(log_prob_form="true"), r"log_prob_form='true' must be one of: gaussian, unnormalised"),
    ],
)
def test_a_parameter_out_of_range_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("step", [(0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (math.nan, 0.1)])
def test_a_step_that_does_not_fall_within_zero_and_one_is_refused(step):
    with pytest.raises(ValueError, match="sigmas must decrease within"):
        EulerODE().transition(*latents(1, 4), *step)


def test_shapes_that_do_not_match_are_refused():
    x, v = latents(3, 4)
    with unchecked(), pytest.raises(ValueError, match=r"2 noise levels for 3 rows"):
        EulerODE().transition(x, v, torch.tensor([0.5, 0.4]), 0.1)
    with unchecked(), pytest.raises(ValueError, match=r"x \(3, 4\) and v \(1, 4\) must have the same shape"):
        EulerODE().transition(x, v[:1], 0.5, 0.1)
