"""Transition kernels: how a flow model steps from sigma to sigma_next, as a Gaussian.

Flow convention: x = (1 - sigma) x0 + sigma eps, v = eps - x0, sigma runs from 1 to 0. Every kernel has the form

    x_next ~ N((1 - sigma_next) x0 + c noise, std^2 I),   x0 = x - sigma v,   noise = x + (1 - sigma) v

and supplies only (c, std). Kernels are equal by value, so segments of one rollout can be joined.

Coefficients are computed per row in float64 on the host. The bits of a row therefore depend neither on the rest of the
batch nor on the type of sigma, a float or a [B] tensor. Keep sigmas on the CPU: reading them from a GPU synchronises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from unirl.sde.gaussian import Gaussian, UnnormalisedGaussian, per_row
from unirl.types.device import to_device
from unirl.types.protocols import Previous

if TYPE_CHECKING:
    from jaxtyping import Float

LogProbForm = Literal["gaussian", "unnormalised"]
SolverVariant = Literal["midpoint", "heun"]

MIN_ETA = 1e-7
"""With a smaller eta a kernel is deterministic: the Euler step, without a density."""


class LinearKernel(ABC):
    """x_next ~ N((1 - sigma_next) x0 + c noise, std^2 I), for x0 = x - sigma v and noise = x + (1 - sigma) v.

    A subclass is a frozen dataclass that supplies (c, std).
    """

    multistep: ClassVar[bool] = False
    """True if `transition` reads `previous`."""
    preserves: ClassVar[str]
    """The property that holds for exact predictions, a word of the README; `unirl.testing.check_kernel` checks it."""

    @abstractmethod
    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form."""

    def has_density(self, step: int, num_steps: int) -> bool:
        """True if step `step` of `num_steps` is stochastic. The last step never is."""
        return False

    def transition(
        self,
        x: Float[Tensor, "B *latent"],
        v: Float[Tensor, "B *latent"],
        sigma: float | Float[Tensor, ""] | Float[Tensor, "B"],
        sigma_next: float | Float[Tensor, ""] | Float[Tensor, "B"],
        previous: Previous | None = None,
    ) -> Gaussian:
        """The distribution of x at `sigma_next`, given x and the velocity v at `sigma`.

        Args:
            sigma, sigma_next: one number for all rows, or [B].
            previous: the last deterministic step, for multistep kernels; None at the start and after a stochastic step.
        """
        x, v = working_pair(x, v)
        on_x, on_v, stds = [], [], []
        for start, end in checked_steps(sigma, sigma_next, len(x)):
            c, std = self.coefficients(start, end)
            excess = c - end  # 0 for Euler, whose mean is then exactly x + v dt
            on_x.append(1.0 + excess)
            on_v.append((end - start) + excess * (1.0 - start))
            stds.append(std)
        shared = is_shared(sigma, sigma_next)
        weight_x, weight_v, std_rows = (row_tensor(values, x, shared=shared) for values in (on_x, on_v, stds))
        mean = per_row(weight_x, x) * x + per_row(weight_v, x) * v
        return self.distribution(mean, std_rows, min(stds) > 0.0)

    @property
    def distribution(self) -> type[Gaussian]:
        """The class that `transition` returns. A kernel with another log-prob overrides this."""
        return Gaussian


@dataclass(frozen=True, kw_only=True)
class NoisyKernel(LinearKernel):
    """A kernel that adds noise of strength eta. With eta = 0 it is the Euler step."""

    eta: float
    max_eta: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.eta <= self.max_eta or math.isinf(self.eta):
            raise ValueError(
                f"{type(self).__name__}.eta={self.eta} must be a finite number within [0, {self.max_eta:g}]; "
                "0 is the deterministic Euler step"
            )

    @abstractmethod
    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form for eta > 0."""

    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        return (sigma_next, 0.0) if self.eta < MIN_ETA else self.noisy_coefficients(sigma, sigma_next)

    def has_density(self, step: int, num_steps: int) -> bool:
        return self.eta >= MIN_ETA and 0 <= step < num_steps - 1


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
        angle = self.eta * math.pi / 2.0
        return sigma_next * math.cos(angle), sigma_next * math.sin(angle)

    @property
    def distribution(self) -> type[Gaussian]:
        return Gaussian if self.log_prob_form == "gaussian" else UnnormalisedGaussian


@dataclass(frozen=True, kw_only=True)
class FlowDDIM(NoisyKernel):
    """DDIM (arXiv:2010.02502) in flow form: std is eta times that of the posterior q(x_next | x, x0)."""

    preserves: ClassVar[str] = "posterior"
    max_eta: ClassVar[float] = 1.0
    eta: float = 1.0
    """1 is the exact posterior (DDPM), 0 is the Euler step."""

    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        ratio = sigma_next * (1.0 - sigma) / (sigma * (1.0 - sigma_next))
        std = self.eta * sigma_next * math.sqrt(1.0 - ratio**2)
        return math.sqrt(sigma_next**2 - std**2), std


@dataclass(frozen=True, kw_only=True)
class EulerODE(LinearKernel):
    """Euler step of the probability-flow ODE: x + v dt."""

    preserves: ClassVar[str] = "path"

    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        return sigma_next, 0.0


@dataclass(frozen=True, kw_only=True)
class DPMSolver2M(EulerODE):
    """DPM-Solver++(2M), arXiv:2211.01095, on the probability-flow ODE; first order (Euler) without `previous`.

    With lambda = log((1 - sigma) / sigma), h = lambda_next - lambda, r = (lambda - lambda_previous) / h,
    the Euler mean is corrected by w (x0 - x0_previous):

        midpoint: w = -(1 - sigma_next) (e^-h - 1) / (2 r)        heun: w = (1 - sigma_next) ((e^-h - 1) / h + 1) / r
    """

    multistep: ClassVar[bool] = True
    variant: SolverVariant = "midpoint"
    """`heun` is exact if the clean prediction is linear in lambda."""

    def __post_init__(self) -> None:
        check_choice("DPMSolver2M.variant", self.variant, get_args(SolverVariant))

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
        euler = super().transition(x, v, sigma, sigma_next)
        if previous is None:
            return euler
        highest = float(torch.as_tensor(sigma).max())
        if not previous.sigma > highest:
            raise ValueError(
                f"previous.sigma={previous.sigma:g} must be above sigma={highest:g}: it is the sigma at which the "
                "previous step started; pass previous=None at the first step and after a stochastic one"
            )
        steps = checked_steps(sigma, sigma_next, len(x))
        weights = [self.correction(previous.sigma, start, end) for start, end in steps]
        weight = row_tensor(weights, euler.mean, shared=is_shared(sigma, sigma_next))
        change = predicted_x0(x, v, sigma) - previous.x0.to(euler.mean)
        return Gaussian(euler.mean + per_row(weight, change) * change, euler.std)


def log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma), for sigma in (0, 1)."""
    return math.log1p(-sigma) - math.log(sigma)


def working_pair(
    x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"]
) -> tuple[Float[Tensor, "B *latent"], Float[Tensor, "B *latent"]]:
    """x and v in float64 if either is, else in float32: bfloat16 would round away the small drift of a step."""
    if x.shape != v.shape:
        raise ValueError(f"x {tuple(x.shape)} and v {tuple(v.shape)} must have the same shape [B, *latent]")
    dtype = torch.promote_types(torch.promote_types(x.dtype, v.dtype), torch.float32)
    return x.to(dtype), v.to(dtype)


def row_values(sigma: float | Float[Tensor, ""] | Float[Tensor, "B"], count: int) -> list[float]:
    """`count` noise levels as Python floats. A single one is repeated."""
    values: list[float] = torch.as_tensor(sigma, dtype=torch.float64).reshape(-1).tolist()
    if len(values) not in (1, count):
        raise ValueError(f"{len(values)} noise levels for {count} rows: pass one number, or one per row")
    return values if len(values) == count else values * count


def row_tensor(
    values: list[float], like: Float[Tensor, "..."], *, shared: bool
) -> Float[Tensor, ""] | Float[Tensor, "B"]:
    """`values` with the dtype and device of `like`: [] if `shared` by all rows, else [B]."""
    tensor = torch.tensor(values[0] if shared else values, dtype=like.dtype)
    return to_device(tensor, like.device)


def is_shared(*sigmas: float | Float[Tensor, "..."]) -> bool:
    """True if every noise level is one number for all rows."""
    return all(torch.as_tensor(sigma).dim() == 0 for sigma in sigmas)


def checked_steps(
    sigma: float | Float[Tensor, ""] | Float[Tensor, "B"],
    sigma_next: float | Float[Tensor, ""] | Float[Tensor, "B"],
    num_rows: int,
) -> list[tuple[float, float]]:
    """(sigma, sigma_next) per row, or one pair for all. Raises ValueError unless 1 >= sigma > sigma_next >= 0."""
    count = 1 if is_shared(sigma, sigma_next) else num_rows
    steps = list(zip(row_values(sigma, count), row_values(sigma_next, count), strict=True))
    for start, end in steps:
        if not 1.0 >= start > end >= 0.0:
            raise ValueError(
                f"a step from sigma={start:g} to sigma_next={end:g}: sigmas must decrease within [0, 1] "
                "(1 is noise, 0 is clean); pass adjacent entries of the schedule"
            )
    return steps


def predicted_x0(
    x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"], sigma: float | Float[Tensor, ""] | Float[Tensor, "B"]
) -> Float[Tensor, "B *latent"]:
    """x - sigma v, the predicted clean sample."""
    x, v = working_pair(x, v)
    shared = is_shared(sigma)
    weights = [-value for value in row_values(sigma, 1 if shared else len(x))]
    return x + per_row(row_tensor(weights, x, shared=shared), x) * v


def predicted_noise(
    x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"], sigma: float | Float[Tensor, ""] | Float[Tensor, "B"]
) -> Float[Tensor, "B *latent"]:
    """x + (1 - sigma) v, the predicted noise. The score is -noise / sigma."""
    return predicted_x0(x, v, sigma) + v


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of: {', '.join(choices)}")
