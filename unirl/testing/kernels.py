"""The check of a transition kernel: the contract of every kernel, and the property that this one `preserves`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributions import Normal

from unirl.sde.kernels import EulerODE, predicted_x0
from unirl.sde.schedule import SigmaSchedule
from unirl.types.protocols import Kernel, Previous

NUM_STEPS = 10
MEAN, STD = 0.7, 0.5
"""Mean and std of Gaussian data, for which exact predictions are known."""


def check_kernel(kernel: Kernel) -> None:
    """Raises AssertionError, in a sentence, unless `kernel` keeps the contract of kernels and what it `preserves`.

    It is equal and hashable by value. The mean is linear in x and v, and right for data without noise. Inputs of lower
    precision are computed in float32. The bits of a row do not depend on its batch or on the type of sigma. log_prob is
    that of a normal distribution. `has_density` is true only if std > 0, and never at the last step. A kernel with a
    field `eta` takes the Euler step at eta = 0.
    """
    for check in (_by_value, _linear, _dtypes, _density, _row_bits, _log_prob, _euler_without_noise):
        check(kernel)
    words = ", ".join(PRESERVES)
    _expect(kernel, kernel.preserves in PRESERVES, f"preserves={kernel.preserves!r} must be one of: {words}")
    PRESERVES[kernel.preserves](kernel)


def schedule_steps() -> list[tuple[float, float]]:
    """(sigma, sigma_next) of the steps of the SD3 schedule, from exactly 1 to exactly 0."""
    return list(pairwise(SigmaSchedule(shift=3.0).sigmas(NUM_STEPS).tolist()))


def mean_weights(kernel: Kernel, sigma: float, sigma_next: float) -> tuple[float, float, float]:
    """(a, b, std) with mean = a x + b v, measured with two inputs."""
    probes = torch.eye(2, dtype=torch.float64)
    step = kernel.transition(probes[:, :1], probes[:, 1:], sigma, sigma_next)
    (a, b), std = step.mean.flatten().tolist(), float(step.std)
    return a, b, std


def _expect(kernel: Kernel, holds: bool, claim: str) -> None:
    if not holds:
        raise AssertionError(f"{kernel}: {claim}")


def _latents(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draws = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return draws[0].to(dtype), draws[1].to(dtype)


# --- the contract of every kernel -------------------------------------------------------------------------------------


def _by_value(kernel: Kernel) -> None:
    _expect(kernel, is_dataclass(kernel), "must be a frozen dataclass, so that segments can share it")
    twin = replace(kernel)  # type: ignore[type-var]  # a dataclass, as was just checked
    same = twin == kernel and not _raises(TypeError, lambda: hash(kernel))
    _expect(kernel, same, "a copy must be equal and hashable: freeze the dataclass")


def _raises(error: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def _linear(kernel: Kernel) -> None:
    x, v = _latents(3, 5)
    for sigma, sigma_next in schedule_steps():
        a, b, _ = mean_weights(kernel, sigma, sigma_next)
        mean = kernel.transition(x, v, sigma, sigma_next).mean
        where = f"from sigma={sigma:.4g} to {sigma_next:.4g}"
        _expect(kernel, torch.allclose(mean, a * x + b * v, rtol=0, atol=1e-12), f"the mean {where} is not linear")
        clean = a * (1.0 - sigma) - b  # data at 1, no noise: x = 1 - sigma, v = -1
        _expect(kernel, abs(clean - (1.0 - sigma_next)) < 1e-12, f"data without noise leave their path {where}")


def _dtypes(kernel: Kernel) -> None:
    sigma, sigma_next = schedule_steps()[3]
    for given, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        x, v = _latents(3, 5, dtype=given)
        step = kernel.transition(x, v, sigma, sigma_next)
        same = step.mean.dtype == step.std.dtype == expected
        _expect(kernel, same, f"{given} inputs must be computed in {expected}, not {step.mean.dtype}")
        exact = kernel.transition(x.to(expected), v.to(expected), sigma, sigma_next).mean
        _expect(kernel, torch.equal(step.mean, exact), f"{given} inputs must be converted before any arithmetic")


def _row_bits(kernel: Kernel) -> None:
    steps = schedule_steps()[:4]
    x, v = _latents(len(steps), 40_000, dtype=torch.float32)
    sigma, sigma_next = (torch.tensor(column) for column in zip(*steps, strict=True))
    batch = kernel.transition(x, v, sigma, sigma_next)
    _expect(kernel, batch.std.shape == (len(steps),), "std must have one value per row if sigma has")
    dense = bool((batch.std > 0.0).all())
    for row, (start, end) in enumerate(steps):
        alone = kernel.transition(x[row : row + 1], v[row : row + 1], start, end)
        same = torch.equal(alone.mean[0], batch.mean[row]) and torch.equal(alone.std, batch.std[row])
        _expect(kernel, same, "the bits of mean or std of a row depend on its batch or on the type of sigma")
        same = not dense or torch.equal(alone.log_prob(v[row : row + 1])[0], batch.log_prob(v)[row])
        _expect(kernel, same, "the bits of log_prob of a row depend on its batch or on the type of sigma")


def _log_prob(kernel: Kernel) -> None:
    x, v = _latents(3, 5)
    for i, (sigma, sigma_next) in enumerate(schedule_steps()):
        if not kernel.has_density(i, NUM_STEPS):
            continue
        step = kernel.transition(x, v, sigma, sigma_next)
        x_next = step.sample(x.flip(0)).requires_grad_()
        _expect(kernel, torch.allclose(x_next, step.mean + step.std * x.flip(0)), "sample is not mean + std * noise")
        logp = step.log_prob(x_next)
        normal = Normal(step.mean, step.std).log_prob(x_next).mean(1)
        published = -(x_next - step.mean).square().mean(1)
        same = any(torch.allclose(logp, form, rtol=1e-9, atol=1e-12) for form in (normal, published))
        _expect(kernel, same, "log_prob is neither the mean of Normal(mean, std).log_prob nor the bare -(error)^2")
        _expect(kernel, not logp.requires_grad, "log_prob must detach x_next")


def _density(kernel: Kernel) -> None:
    x, v = _latents(3, 5)
    for i, (sigma, sigma_next) in enumerate(schedule_steps()):
        step, last = kernel.transition(x, v, sigma, sigma_next), i == NUM_STEPS - 1
        std, dense = float(step.std), kernel.has_density(i, NUM_STEPS)
        _expect(kernel, not (last and dense), "the last step must have no density")
        _expect(kernel, last or dense == (std > 0.0), f"has_density({i}, {NUM_STEPS}) is {dense}, std is {std:g}")
        _expect(kernel, math.isfinite(std) and bool(step.mean.isfinite().all()), f"step {i} is not finite")
        if std == 0.0:
            refuses = _raises(ValueError, partial(step.log_prob, x))
            _expect(kernel, refuses, "log_prob at std 0 must raise ValueError")


def _euler_without_noise(kernel: Kernel) -> None:
    if "eta" not in {field.name for field in fields(kernel)}:  # type: ignore[arg-type]  # a dataclass, as was checked
        return
    without_noise, x_v = replace(kernel, eta=0.0), _latents(3, 5)  # type: ignore[type-var]
    for i, (sigma, sigma_next) in enumerate(schedule_steps()):
        mean = without_noise.transition(*x_v, sigma, sigma_next).mean
        same = torch.allclose(mean, EulerODE().transition(*x_v, sigma, sigma_next).mean, rtol=0, atol=1e-12)
        dense = without_noise.has_density(i, NUM_STEPS)
        _expect(kernel, same and not dense, "eta = 0 must be the Euler step, without a density")


# --- the properties that a kernel may preserve, on Gaussian data -----------------------------------------------------


def gaussian_velocity(x: Tensor, sigma: float) -> Tensor:
    """The exact velocity at x, for data N(MEAN, STD^2)."""
    centred, variance = x - (1.0 - sigma) * MEAN, marginal_variance(sigma)
    x0 = MEAN + (1.0 - sigma) * STD**2 / variance * centred
    return sigma / variance * centred - x0


def marginal_variance(sigma: float) -> float:
    """The variance of x at `sigma`, for data N(MEAN, STD^2)."""
    return (1.0 - sigma) ** 2 * STD**2 + sigma**2


def _uniform(num_steps: int) -> list[float]:
    # Inside (0, 1): at sigma = 1 Flow-SDE's noise is singular, and its error there does not fall with the step.
    return [0.9 + (0.05 - 0.9) * i / num_steps for i in range(num_steps + 1)]


def _falls(kernel: Kernel, error: Callable[[int], float], order: int, what: str) -> None:
    coarse, fine = error(160), error(320)
    claim = f"the error of its {what} is {coarse:.2e} in 160 steps and {fine:.2e} in 320: it must have order {order}"
    _expect(kernel, fine < 1e-10 or fine < coarse * 0.6**order, claim)


def _marginals(kernel: Kernel) -> None:
    def error(num_steps: int) -> float:
        sigmas, errors = _uniform(num_steps), []
        variance = marginal_variance(sigmas[0])
        for sigma, sigma_next in pairwise(sigmas):
            a, b, std = mean_weights(kernel, sigma, sigma_next)
            slope = (sigma - (1.0 - sigma) * STD**2) / marginal_variance(sigma)  # of the exact velocity in x
            variance = (a + b * slope) ** 2 * variance + std**2
            errors.append(abs(variance - marginal_variance(sigma_next)))
        return max(errors)

    _falls(kernel, error, 1, "marginal variance")


def _noise_level(kernel: Kernel) -> None:
    for sigma, sigma_next in schedule_steps():
        a, b, std = mean_weights(kernel, sigma, sigma_next)
        c = a * sigma + b  # data at 0, noise at 1: x = sigma, v = 1
        same = abs(c**2 + std**2 - sigma_next**2) < 1e-12
        _expect(kernel, same, f"c^2 + std^2 is not sigma_next^2 at sigma_next={sigma_next:.4g}")


def _posterior(kernel: Kernel) -> None:
    _noise_level(kernel)
    shares = []
    for sigma, sigma_next in schedule_steps()[:-1]:
        decay = (1.0 - sigma) / (1.0 - sigma_next)
        posterior = sigma_next * math.sqrt(1.0 - (decay * sigma_next / sigma) ** 2)
        shares.append(mean_weights(kernel, sigma, sigma_next)[2] / posterior)
    same = max(shares) - min(shares) < 1e-9 and max(shares) < 1.0 + 1e-9
    _expect(kernel, same, "its std is not a constant fraction, at most 1, of the std of the posterior")


def _path(kernel: Kernel) -> None:
    for sigma, sigma_next in schedule_steps():
        std = mean_weights(kernel, sigma, sigma_next)[2]
        _expect(kernel, std == 0.0, "a kernel that preserves the path has no noise")

    def error(num_steps: int) -> float:
        sigmas = _uniform(num_steps)
        x = torch.linspace(-2.0, 2.0, 5, dtype=torch.float64)[:, None]
        scale = math.sqrt(marginal_variance(sigmas[-1]) / marginal_variance(sigmas[0]))
        exact = (1.0 - sigmas[-1]) * MEAN + scale * (x - (1.0 - sigmas[0]) * MEAN)
        previous = None
        for sigma, sigma_next in pairwise(sigmas):
            v = gaussian_velocity(x, sigma)
            step = kernel.transition(x, v, sigma, sigma_next, previous)
            previous, x = Previous(sigma, predicted_x0(x, v, sigma)), step.mean
        return float((x - exact).abs().max())

    _falls(kernel, error, 2 if kernel.multistep else 1, "path")


PRESERVES: dict[str, Callable[[Kernel], None]] = {
    "marginals": _marginals,
    "noise level": _noise_level,
    "posterior": _posterior,
    "path": _path,
}
"""The values of `preserves`, each with its check."""
