"""Step weights against the slopes of the literature, autograd, and what each rule promises."""

import math
from itertools import pairwise

import pytest
import torch

from unirl.algorithms.shared.denoising import StepWeights, step_weights, velocity_slope
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowDDIM, FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.protocols import Kernel

T = 10
SIGMAS = SigmaSchedule(shift=3.0).sigmas(T)
SPANS = list(pairwise(SIGMAS.tolist()))
KERNELS: list[Kernel] = [
    FlowSDEStrategy(eta=0.7),
    DanceSDEStrategy(eta=0.3),
    CPSSDEStrategy(eta=0.8),
    CPSSDEStrategy(eta=0.8, log_prob_form="unnormalised"),
    FlowDDIM(eta=0.9),
]
NAMES = ["flow", "dance", "cps", "cps-unnormalised", "ddim"]


@pytest.mark.parametrize(
    ("kernel", "published"),
    [
        (KERNELS[0], [0.051, 0.070, 0.113, 0.160, 0.219, 0.296, 0.406, 0.574, 0.868]),
        (KERNELS[1], [0.63, 0.68, 0.73, 0.80, 0.88, 0.98, 1.10, 1.26, 1.49]),
        (KERNELS[3], [0.066, 0.112, 0.157, 0.198, 0.232, 0.252, 0.250, 0.215, 0.132]),
    ],
    ids=["flow", "dance", "cps-unnormalised"],
)
def test_slopes_are_those_tabulated_for_ten_steps(kernel: Kernel, published: list[float]) -> None:
    result = [abs(velocity_slope(kernel, *span)) for span in SPANS[:-1]]
    assert result == pytest.approx(published, abs=6e-3 if published[0] > 0.5 else 6e-4)


def closed_form(kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """kappa by hand."""
    dt = sigma - sigma_next
    if isinstance(kernel, FlowSDEStrategy | DanceSDEStrategy):
        s = kernel.eta
        if isinstance(kernel, FlowSDEStrategy):
            s *= math.sqrt(sigma / (1 - (sigma_next if sigma == 1 else sigma)))
        return -(math.sqrt(dt) / s + s * math.sqrt(dt) * (1 - sigma) / (2 * sigma))
    if isinstance(kernel, CPSSDEStrategy):
        std = sigma_next * math.sin(kernel.eta * math.pi / 2)
    else:
        assert isinstance(kernel, FlowDDIM)
        std = kernel.eta * sigma_next
        std *= math.sqrt(1 - (sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))) ** 2)
    b = -sigma * (1 - sigma_next) + (1 - sigma) * math.sqrt(sigma_next**2 - std**2)
    published = isinstance(kernel, CPSSDEStrategy) and kernel.log_prob_form == "unnormalised"
    return 2 * std * b if published else b / std


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_a_slope_is_the_closed_form_of_its_kernel(kernel: Kernel) -> None:
    for span in SPANS[:-1]:
        assert velocity_slope(kernel, *span) == pytest.approx(closed_form(kernel, *span), rel=1e-9)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
@pytest.mark.parametrize("latent", [(3, 4, 5), (3, 2, 4, 5)], ids=["image", "video"])
def test_the_gradient_of_a_log_prob_in_the_velocity_is_the_slope_times_z_over_the_size(
    kernel: Kernel, latent: tuple[int, ...]
) -> None:
    draws = torch.randn(3, 2, *latent, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x, z, v = draws[0], draws[1], draws[2].requires_grad_()
    for span in SPANS[:-1]:
        step = kernel.transition(x, v, *span)
        (gradient,) = torch.autograd.grad(step.log_prob(step.sample(z)).sum(), v)
        assert torch.allclose(gradient, velocity_slope(kernel, *span) * z / math.prod(latent), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_flash_weights_equalise_the_gradient_in_the_velocity(kernel: Kernel) -> None:
    weights = step_weights("flash", kernel, SIGMAS, range(T - 1))
    felt = [w * abs(closed_form(kernel, *span)) for w, span in zip(weights, SPANS[:-1], strict=True)]
    assert felt == pytest.approx([felt[0]] * (T - 1), rel=1e-6)
    assert sum(weights) / len(weights) == pytest.approx(1.0)


def test_tempflow_weights_are_two_and_a_quarter_standard_deviations() -> None:
    published = [0.7, 0.73837, 0.53169, 0.44146, 0.38774, 0.35, 0.3195, 0.29047, 0.25617]
    assert step_weights("tempflow", KERNELS[0], SIGMAS, range(T - 1)) == pytest.approx(
        [2.25 * std for std in published], abs=2e-5
    )


def test_inverse_dt_weights_are_proportional_to_it_with_mean_one() -> None:
    weights = step_weights("inverse_dt", KERNELS[1], SIGMAS, range(T - 1))
    products = [w * (start - end) for w, (start, end) in zip(weights, SPANS[:-1], strict=True)]
    assert products == pytest.approx([products[0]] * (T - 1))
    assert sum(weights) / len(weights) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["uniform", "tempflow", "flash", "inverse_dt"])
def test_a_steps_weight_does_not_depend_on_which_others_are_trained(rule: StepWeights) -> None:
    together = step_weights(rule, KERNELS[0], SIGMAS, range(T - 1))
    assert [step_weights(rule, KERNELS[0], SIGMAS, [i])[0] for i in range(T - 1)] == together
    assert step_weights(rule, KERNELS[0], SIGMAS, (5, 2)) == [together[5], together[2]]
    assert (set(together) == {1.0}) == (rule == "uniform")


def test_slopes_are_computed_under_no_grad() -> None:
    with torch.no_grad():
        assert velocity_slope(KERNELS[0], *SPANS[3]) == pytest.approx(closed_form(KERNELS[0], *SPANS[3]))
