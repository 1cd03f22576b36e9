"""The public check passes every kernel of ours and finds what is wrong with a broken one."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from unirl.sde.gaussian import Gaussian
from unirl.sde.kernels import (
    CPSSDEStrategy,
    DanceSDEStrategy,
    DPMSolver2M,
    EulerODE,
    FlowDDIM,
    FlowSDEStrategy,
    LinearKernel,
    NoisyKernel,
)
from unirl.testing import check_kernel

KERNELS = [
    FlowSDEStrategy(),
    FlowSDEStrategy(eta=1.2),
    FlowSDEStrategy(eta=0.0),
    DanceSDEStrategy(),
    CPSSDEStrategy(),
    CPSSDEStrategy(log_prob_form="unnormalised"),
    CPSSDEStrategy(eta=1.0),
    FlowDDIM(),
    FlowDDIM(eta=0.3),
    EulerODE(),
    DPMSolver2M(variant="midpoint"),
    DPMSolver2M(variant="heun"),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_kernel_keeps_its_promises(kernel):
    check_kernel(kernel)


@dataclass(frozen=True, kw_only=True)
class HalfTheScore(DanceSDEStrategy):
    """Injects noise and removes half as much."""

    def noisy_coefficients(self, sigma, sigma_next):
        c, std = DanceSDEStrategy.noisy_coefficients(self, sigma, sigma_next)
        return (c + sigma_next) / 2, std


@dataclass(frozen=True, kw_only=True)
class TooMuchFreshNoise(CPSSDEStrategy):
    def noisy_coefficients(self, sigma, sigma_next):
        return sigma_next * math.cos(self.eta), sigma_next * math.sin(self.eta) * 1.01


@dataclass(frozen=True, kw_only=True)
class AlwaysDense(FlowDDIM):
    def has_density(self, step, num_steps):
        return True


@dataclass(frozen=True, kw_only=True)
class NeverDense(DanceSDEStrategy):
    def has_density(self, step, num_steps):
        return False


@dataclass(frozen=True, kw_only=True)
class NoisyPath(DanceSDEStrategy):
    preserves: ClassVar[str] = "path"


@dataclass(frozen=True, kw_only=True)
class FirstOrderSolver(DPMSolver2M):
    def correction(self, sigma_previous, sigma, sigma_next):
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Vague(EulerODE):
    preserves: ClassVar[str] = "quality"


@dataclass(frozen=True, kw_only=True)
class NotADirac(EulerODE):
    def coefficients(self, sigma, sigma_next):
        return sigma_next, 0.01


class NotADataclass(LinearKernel):
    preserves = "path"

    def coefficients(self, sigma, sigma_next):
        return sigma_next, 0.0


@dataclass(frozen=True, kw_only=True)
class Stateful(EulerODE):
    memory: list = field(default_factory=list)


@dataclass
class Thawed(LinearKernel):
    preserves: ClassVar[str] = "path"

    def coefficients(self, sigma, sigma_next):
        return sigma_next, 0.0


@dataclass(frozen=True, kw_only=True)
class WithBias(EulerODE):
    def distribution(self, mean, std, dense):
        return Gaussian(mean + 0.1, std, dense)


@dataclass(frozen=True, kw_only=True)
class LowPrecision(DanceSDEStrategy):
    def transition(self, x, v, sigma, sigma_next, previous=None):
        step = DanceSDEStrategy.transition(self, x, v, sigma, sigma_next)
        return Gaussian(step.mean.to(x.dtype), step.std)


@dataclass(frozen=True, kw_only=True)
class WithSum(DanceSDEStrategy):
    def distribution(self, mean, std, dense):
        return SummedGaussian(mean, std, dense)


@dataclass(frozen=True, eq=False)
class SummedGaussian(Gaussian):
    def log_prob(self, x_next):
        return Gaussian.log_prob(self, x_next) * self.mean[0].numel()


@dataclass(frozen=True, kw_only=True)
class OfTheBatch(DanceSDEStrategy):
    def distribution(self, mean, std, dense):
        return BatchGaussian(mean, std, dense)


@dataclass(frozen=True, eq=False)
class BatchGaussian(Gaussian):
    def log_prob(self, x_next):
        return Gaussian.log_prob(self, x_next) * (1 + 1e-6 * len(x_next))


@dataclass(frozen=True, kw_only=True)
class WithGradient(DanceSDEStrategy):
    def distribution(self, mean, std, dense):
        return AttachedGaussian(mean, std, dense)


@dataclass(frozen=True, eq=False)
class AttachedGaussian(Gaussian):
    def log_prob(self, x_next):
        return Gaussian.log_prob(self, x_next) + 0.0 * x_next.flatten(1).sum(1)


@dataclass(frozen=True, kw_only=True)
class NoisyAtZero(NoisyKernel):
    preserves: ClassVar[str] = "noise level"
    eta: float = 0.5

    def noisy_coefficients(self, sigma, sigma_next):
        return sigma_next * math.cos(self.eta), sigma_next * math.sin(self.eta)

    def coefficients(self, sigma, sigma_next):
        angle = self.eta + 0.1
        return sigma_next * math.cos(angle), sigma_next * math.sin(angle)


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (HalfTheScore(), "marginal variance"),
        (TooMuchFreshNoise(), r"is not sigma_next\^2"),
        (AlwaysDense(), "the last step must have no density"),
        (NeverDense(), r"has_density\(0, 10\) is False"),
        (NoisyPath(), "preserves the path has no noise"),
        (FirstOrderSolver(), "must have order 2"),
        (Vague(), "preserves='quality' must be one of: marginals, noise level, posterior, path"),
        (NotADirac(), r"has_density\(0, 10\) is False, std is 0.01"),
        (NotADataclass(), "must be a frozen dataclass"),
        (Stateful(), "hashable: freeze the dataclass"),
        (WithBias(), "is not linear"),
        (LowPrecision(), "bfloat16 inputs must be computed in torch.float32"),
        (OfTheBatch(), "the bits of log_prob of a row"),
        (Thawed(), "hashable: freeze the dataclass"),
        (WithSum(), "log_prob is neither"),
        (WithGradient(), "log_prob must detach x_next"),
        (NoisyAtZero(), "eta = 0 must be the Euler step"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_kernel_is_found(kernel, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_kernel(kernel)
