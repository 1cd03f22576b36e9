"""Transition kernels: how a flow model steps from sigma to sigma_next, as a Gaussian.

Flow convention: x = (1 - sigma) x0 + sigma eps, v = eps - x0, sigma runs from 1 to 0. Every kernel has the form

    x_next ~ N((1 - sigma_next) x0 + c noise, std^2 I),   x0 = x - sigma v,   noise = x + (1 - sigma) v

(`unirl.sde.linear`), and supplies only (c, std). Kernels are equal by value, so segments of one rollout can be joined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from unirl.sde.gaussian import Gaussian, UnnormalisedGaussian, per_row
from unirl.sde.linear import (
    LinearKernel,
    NoisyKernel,
    check_choice,
    checked_steps,
    is_shared,
    predicted_noise,
    predicted_x0,
    row_tensor,
)
from unirl.types.protocols import Previous

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "CPSSDEStrategy",
    "DPMSolver2M",
    "DanceSDEStrategy",
    "EulerODE",
    "FlowDDIM",
    "FlowSDEStrategy",
    "Gaussian",
    "LinearKernel",
    "NoisyKernel",
    "Previous",
    "predicted_noise",
    "predicted_x0",
]

LogProbForm = Literal["gaussian", "unnormalised"]
SolverVariant = Literal["midpoint", "heun"]


def diffusion_coefficients(diffusion: float, sigma: float, sigma_next: float) -> tuple[float, float]:
    """(c, std) of one Euler-Maruyama step of the SDE with diffusion coefficient `diffusion` (s).

    mean = x + v dt - s^2 score dt / 2,  std = s sqrt(-dt),  dt = sigma_next - sigma < 0
    """
    variance = diffusion**2 * (sigma - sigma_next)
    return sigma_next - variance / (2.0 * sigma), math.sqrt(variance)


@dataclass(frozen=True, kw_only=True)
class FlowSDEStrategy(NoisyKernel):
    """Flow-SDE of Flow-GRPO, arXiv:2505.05470: s = eta sqrt(sigma / (1 - sigma)), so the first step's std is eta."""

    preserves: ClassVar[str] = "marginals"
    eta: float = 0.7
    """Noise strength."""

    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form for eta > 0."""
        # s diverges at sigma = 1. Only there, Flow-GRPO uses 1 - sigma_next instead of 1 - sigma.
        clean = 1.0 - (sigma_next if sigma == 1.0 else sigma)
        return diffusion_coefficients(self.eta * math.sqrt(sigma / clean), sigma, sigma_next)


@dataclass(frozen=True, kw_only=True)
class DanceSDEStrategy(NoisyKernel):
    """Dance-SDE of DanceGRPO, arXiv:2505.07818: the diffusion coefficient is the constant eta."""

    preserves: ClassVar[str] = "marginals"
    eta: float = 0.3
    """Diffusion coefficient s, per square root of sigma."""

    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form for eta > 0."""
        return diffusion_coefficients(self.eta, sigma, sigma_next)


@dataclass(frozen=True, kw_only=True)
class CPSSDEStrategy(NoisyKernel):
    """Coefficients-preserving sampling, Flow-CPS, arXiv:2509.05952: c^2 + std^2 = sigma_next^2."""

    preserves: ClassVar[str] = "noise level"
    max_eta: ClassVar[float] = 1.0
    eta: float = 0.8
    """Amount of fresh noise: std = sigma_next sin(eta pi / 2)."""
    log_prob_form: LogProbForm = "gaussian"
    """`gaussian` is the true density; `unnormalised` is the published -(x_next - mean)^2, for other clip ranges."""

    def __post_init__(self) -> None:
        NoisyKernel.__post_init__(self)
        check_choice("CPSSDEStrategy.log_prob_form", self.log_prob_form, get_args(LogProbForm))

    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form for eta > 0."""
        angle = self.eta * math.pi / 2.0
        return sigma_next * math.cos(angle), sigma_next * math.sin(angle)

    def distribution(
        self, mean: Float[Tensor, "B *latent"], std: Float[Tensor, ""] | Float[Tensor, "B"], dense: bool
    ) -> Gaussian:
        """A Gaussian with the log-prob that `log_prob_form` selects."""
        form = Gaussian if self.log_prob_form == "gaussian" else UnnormalisedGaussian
        return form(mean, std, dense)


@dataclass(frozen=True, kw_only=True)
class FlowDDIM(NoisyKernel):
    """DDIM (arXiv:2010.02502) in flow form: std is eta times that of the posterior q(x_next | x, x0)."""

    preserves: ClassVar[str] = "posterior"
    max_eta: ClassVar[float] = 1.0
    eta: float = 1.0
    """1 is the exact posterior (DDPM), 0 is the Euler step."""

    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form for eta > 0."""
        ratio = sigma_next * (1.0 - sigma) / (sigma * (1.0 - sigma_next))
        std = self.eta * sigma_next * math.sqrt(1.0 - ratio**2)
        return math.sqrt(sigma_next**2 - std**2), std


@dataclass(frozen=True, kw_only=True)
class EulerODE(LinearKernel):
    """Euler step of the probability-flow ODE: x + v dt."""

    preserves: ClassVar[str] = "path"

    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form."""
        return sigma_next, 0.0


@dataclass(frozen=True, kw_only=True)
class DPMSolver2M(LinearKernel):
    """DPM-Solver++(2M), arXiv:2211.01095, on the probability-flow ODE; first order (Euler) without `previous`.

    With lambda = log((1 - sigma) / sigma), h = lambda_next - lambda, r = (lambda - lambda_previous) / h,
    the Euler mean is corrected by w (x0 - x0_previous):

        midpoint: w = -(1 - sigma_next) (e^-h - 1) / (2 r)        heun: w = (1 - sigma_next) ((e^-h - 1) / h + 1) / r
    """

    multistep: ClassVar[bool] = True
    preserves: ClassVar[str] = "path"
    variant: SolverVariant = "midpoint"
    """`heun` is exact if the clean prediction is linear in lambda."""

    def __post_init__(self) -> None:
        check_choice("DPMSolver2M.variant", self.variant, get_args(SolverVariant))

    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form, for the first-order part."""
        return sigma_next, 0.0

    def correction(self, sigma_previous: float, sigma: float, sigma_next: float) -> float:
        """The weight w of x0 - x0_previous; 0 where lambda is infinite: for a step that starts at 1 or ends at 0."""
        if not 1.0 > sigma_previous > sigma > sigma_next > 0.0:
            return 0.0
        h = log_snr(sigma_next) - log_snr(sigma)
        r = (log_snr(sigma) - log_snr(sigma_previous)) / h
        shape = -0.5 * math.expm1(-h) if self.variant == "midpoint" else math.expm1(-h) / h + 1.0
        return (1.0 - sigma_next) * shape / r

    def transition(
        self,
        x: Float[Tensor, "B *latent"],
        v: Float[Tensor, "B *latent"],
        sigma: float | Float[Tensor, ""] | Float[Tensor, "B"],
        sigma_next: float | Float[Tensor, ""] | Float[Tensor, "B"],
        previous: Previous | None = None,
    ) -> Gaussian:
        """The next point of the path, as a Gaussian with std 0."""
        euler = super().transition(x, v, sigma, sigma_next)
        if previous is None:
            return euler
        check_previous(previous, sigma)
        steps = checked_steps(sigma, sigma_next, len(x))
        weights = [self.correction(previous.sigma, start, end) for start, end in steps]
        weight = row_tensor(weights, euler.mean, shared=is_shared(sigma, sigma_next))
        change = predicted_x0(x, v, sigma) - previous.x0.to(euler.mean)
        return Gaussian(euler.mean + per_row(weight, change) * change, euler.std)


def log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma), for sigma in (0, 1)."""
    return math.log1p(-sigma) - math.log(sigma)


def check_previous(previous: Previous, sigma: float | Float[Tensor, ""] | Float[Tensor, "B"]) -> None:
    """Raises ValueError unless the previous step started at a higher sigma."""
    highest = float(torch.as_tensor(sigma).max())
    if not previous.sigma > highest:
        raise ValueError(
            f"previous.sigma={previous.sigma:g} must be above sigma={highest:g}: it is the sigma at which the previous "
            "step started; pass previous=None at the first step and after a stochastic one"
        )
