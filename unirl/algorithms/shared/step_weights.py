"""How much each denoising step counts: pure functions of the kernel and the schedule.

Steps differ in how hard a log-prob pulls on the velocity (`velocity_slope`: 17 times between the first and the last
trained one of Flow-SDE's ten), and each rule says what to do about it. Rules that normalise do so over every step that
has a density, so a step's weight does not depend on which others were drawn with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from unirl.types.protocols import Kernel

StepWeights = Literal["uniform", "tempflow", "flash", "inverse_dt"]

Span = tuple[float, float]
"""(sigma, sigma_next) of a step."""

TEMPFLOW_SCALE = 2.25


def velocity_slope(kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """kappa = d log p / dv of a latent of one element, at one standard deviation above the mean (z = 1).

    At z, and with the log-prob averaged over D elements, the slope of each is kappa z / D.
    """
    with torch.enable_grad():
        v = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        step = kernel.transition(torch.zeros_like(v), v, sigma, sigma_next)
        log_prob = step.log_prob(step.sample(torch.ones_like(v)))
        (slope,) = torch.autograd.grad(log_prob.sum(), v)
    return float(slope)


def transition_std(kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """The standard deviation of the noise of a step."""
    x = torch.zeros(1, 1, dtype=torch.float64)
    return float(kernel.transition(x, x, sigma, sigma_next).std)


def uniform(kernel: Kernel, spans: Sequence[Span]) -> list[float]:
    """1: the loss as it is."""
    return [1.0] * len(spans)


def tempflow(kernel: Kernel, spans: Sequence[Span]) -> list[float]:
    """2.25 std: noisy steps explore, and count by it. TempFlow-GRPO, arXiv:2508.04324. Not normalised."""
    return [TEMPFLOW_SCALE * transition_std(kernel, *span) for span in spans]


def flash(kernel: Kernel, spans: Sequence[Span]) -> list[float]:
    """1 / |kappa|, mean 1: the velocity feels every step alike. Flash-GRPO's rectification."""
    return over_mean([1.0 / abs(velocity_slope(kernel, *span)) for span in spans])


def inverse_dt(kernel: Kernel, spans: Sequence[Span]) -> list[float]:
    """1 / (sigma - sigma_next), mean 1. GRPO-Guard, arXiv:2510.22319."""
    return over_mean([1.0 / (start - end) for start, end in spans])


def over_mean(values: Sequence[float]) -> list[float]:
    """The values divided by their mean."""
    mean = sum(values) / len(values)
    return [value / mean for value in values]


RULES: Mapping[StepWeights, Callable[[Kernel, Sequence[Span]], list[float]]] = {
    "uniform": uniform,
    "tempflow": tempflow,
    "flash": flash,
    "inverse_dt": inverse_dt,
}


def step_weights(rule: StepWeights, kernel: Kernel, sigmas: Tensor, steps: Sequence[int]) -> list[float]:
    """The weight of each of `steps`, which have a density, in the schedule `sigmas` [T + 1]."""
    weights = _schedule_weights(rule, kernel, tuple(sigmas.tolist()))  # type: ignore[arg-type]  # equal by value
    return [weights[step] for step in steps]


@cache
def _schedule_weights(rule: StepWeights, kernel: Kernel, sigmas: tuple[float, ...]) -> dict[int, float]:
    num_steps = len(sigmas) - 1
    dense = [i for i in range(num_steps) if kernel.has_density(i, num_steps)]
    spans = [(sigmas[i], sigmas[i + 1]) for i in dense]
    return dict(zip(dense, RULES[rule](kernel, spans), strict=True))
