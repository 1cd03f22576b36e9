"""KL divergences: estimates from log-probs, the exact KL of a denoising step, and an adaptive coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.sde.gaussian import row_means
from unirl.types.protocols import State

if TYPE_CHECKING:
    from jaxtyping import Float

KLEstimator = Literal["k1", "k2", "k3", "k3+"]
KLForm = Literal["transition", "flow_grpo"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, and have no gradient beyond."""
MAX_ESTIMATE = 10.0
"""Upper bound of k3, which grows like exp(-d), so that a single token cannot dominate the update."""


def k1(log_ratio: Float[Tensor, "*elements"]) -> Float[Tensor, "*elements"]:
    """d = log pi - log ref, per element. Its mean under pi is KL(pi || ref); the mean of its gradient is zero."""
    return log_ratio


def k2(log_ratio: Float[Tensor, "*elements"]) -> Float[Tensor, "*elements"]:
    """d^2 / 2, per element. The mean of its gradient under pi is that of KL(pi || ref); its value is biased."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Float[Tensor, "*elements"]) -> Float[Tensor, "*elements"]:
    """exp(-d) - 1 + d >= 0, per element.

    Its mean under pi is KL(pi || ref); the mean of its gradient is that of KL(ref || pi).
    """
    return torch.expm1(-log_ratio) + log_ratio


def kl_estimate(name: KLEstimator, log_ratio: Float[Tensor, "*elements"]) -> Float[Tensor, "*elements"]:
    """KL(pi || ref) per element, estimated from samples of pi. Schulman 2020, "Approximating KL divergence".

    `log_ratio` is log pi - log ref, nats; it is clamped to +-20. k3 is at most MAX_ESTIMATE. k3+ has the value of k3
    and the gradient of k2, both of which are unbiased for KL(pi || ref).
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if name == "k1":
        return k1(log_ratio)
    if name == "k2":
        return k2(log_ratio)
    bounded = k3(log_ratio).clamp(max=MAX_ESTIMATE)
    if name == "k3":
        return bounded
    slope = k2(log_ratio)
    return bounded.detach() + (slope - slope.detach())


def element_means(values: Float[Tensor, "B S *latent"]) -> Float[Tensor, "B S"]:
    """[B, S] mean over the latent dimensions of `values` [B, S, *latent].

    The bits of an entry do not depend on the other entries.
    """
    return row_means(values.flatten(0, 1)).view(values.shape[:2])


def gaussian_kl(
    mean: Float[Tensor, "B S *latent"], other: Float[Tensor, "B S *latent"], std: Float[Tensor, "S"]
) -> Float[Tensor, "B S"]:
    """[B, S] KL(N(mean, std^2) || N(other, std^2)) = (mean - other)^2 / (2 std^2), nats, mean over latent elements."""
    return 0.5 * element_means((mean - other).square()) / std.square()


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """Moves the KL coefficient so that the measured KL stays near a target (Ziegler et al., arXiv:1909.08593, 2.2).

    coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon),  n = samples of the step
    """

    target: float
    """The KL to hold, in the unit of the logged `train/kl`: nats, per latent element or per token."""
    horizon: float = 10_000.0
    """Samples over which the relative change of the coefficient equals the clipped error."""
    max_error: float = 0.2
    """Bound on the relative error of one step."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InvalidValueError(f"algorithm.kl_adaptive.{name} must be > 0, got {value}")

    def factor(self, kl: float, num_samples: float) -> float:
        """The factor of the coefficient after a step of `num_samples` samples with the given KL."""
        error = kl / self.target - 1.0
        return 1.0 + min(max(error, -self.max_error), self.max_error) * num_samples / self.horizon


class KLController:
    """The current factor of a recipe's KL coefficient. It is state of the run and part of a checkpoint."""

    def __init__(self, settings: AdaptiveKL) -> None:
        self.settings = settings
        self.scale = 1.0

    def observe(self, kl: float, num_samples: float) -> None:
        """Updates the factor with the KL of a finished step."""
        self.scale *= self.settings.factor(kl, num_samples)

    def state_dict(self) -> State:
        return {"scale": self.scale}

    def load_state_dict(self, state: State) -> None:
        self.scale = state["scale"]
