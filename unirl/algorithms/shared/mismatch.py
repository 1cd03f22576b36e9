"""Importance weights pi_old / pi_engine, for samples of an engine with other numerics or with weights of earlier steps.

pi_old is the trainer's replay with the weights before the first update of the step, so the ratio is 1 where engine and
trainer agree. A loss multiplies its surrogate by the detached weights: the decoupled objective of AReaL
(arXiv:2505.24298, eq. 5), whose clip is around pi_old and whose weights account for the policy that sampled. It still
divides by the number of all elements, so rejected ones make the gradient smaller; `train/mismatch_cut` logs their
fraction. An element is a token, or a denoising step of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from unirl.algorithms.shared.checks import check_key
from unirl.algorithms.shared.kl import MAX_LOG_RATIO, k3
from unirl.algorithms.shared.packed import RowOffsets
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.config.errors import InvalidValueError
from unirl.types.results import Metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Corrected:
    """The result of a correction."""

    weights: Tensor  # [sum L], or the shape of the elements, >= 0
    cut: Tensor  # of the same shape, bool, the ratio of the element was bounded, or the element was rejected


class Correction(Protocol):
    """Turns log(pi_old / pi_engine) per token into weights. Pure."""

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        """The weights. `log_ratio` is finite, and 0 at tokens that are not counted."""


@runtime_checkable
class ElementCorrection(Correction, Protocol):
    """A correction that weighs every element by itself, so that it is also one of denoising steps."""

    def of_elements(self, log_ratio: Float[Tensor, "*elements"]) -> Corrected:
        """The weights of elements in any shape."""


@dataclass(frozen=True, kw_only=True)
class _Truncated:
    cap: float = 2.0
    """Upper bound of the weight."""

    def __post_init__(self) -> None:
        reason = "below 1 it would cut elements on which engine and trainer agree; 2 is usual"
        check_key(self.cap >= 1.0, "algorithm.mismatch.cap", "be >= 1", self.cap, reason)

    def bounded(self, ratio: Float[Tensor, "*elements"]) -> Corrected:
        """The ratios as weights of at most `cap`."""
        return Corrected(ratio.clamp(max=self.cap), ratio > self.cap)


@dataclass(frozen=True, kw_only=True)
class TokenTIS(_Truncated):
    """w = min(pi_old / pi_engine, cap) per element: truncated importance sampling."""

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        return self.of_elements(log_ratio)

    def of_elements(self, log_ratio: Float[Tensor, "*elements"]) -> Corrected:
        """The weights of elements in any shape."""
        return self.bounded(_exp(log_ratio))


@dataclass(frozen=True, kw_only=True)
class SequenceTIS(_Truncated):
    """w = min(product over the row's tokens of pi_old / pi_engine, cap), one weight per row. Unbiased below the cap."""

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        return self.bounded(rows.spread(_exp(rows.sum(log_ratio))).to(log_ratio.dtype))


@dataclass(frozen=True, kw_only=True)
class _Accepted:
    low: float = 0.5
    """Smallest ratio that is accepted."""
    high: float = 2.0
    """Largest ratio that is accepted."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < 1.0 < self.high:
            raise InvalidValueError(
                f"algorithm.mismatch.low={self.low} and high={self.high} must enclose 1, the ratio of an engine that "
                "agrees with the trainer: 0 <= low < 1 < high"
            )

    def is_outside(self, ratio: Float[Tensor, "*elements"]) -> Bool[Tensor, "*elements"]:
        """True where the ratio is not accepted."""
        return (ratio < self.low) | (ratio > self.high)


@dataclass(frozen=True, kw_only=True)
class MaskedIS(_Accepted):
    """w = pi_old / pi_engine within [low, high], else 0, per element: masked importance sampling, or IcePop."""

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        return self.of_elements(log_ratio)

    def of_elements(self, log_ratio: Float[Tensor, "*elements"]) -> Corrected:
        """The weights of elements in any shape."""
        ratio = _exp(log_ratio)
        cut = self.is_outside(ratio)
        return Corrected(ratio.masked_fill(cut, 0.0), cut)


@dataclass(frozen=True, kw_only=True)
class GeometricRejection(_Accepted):
    """w = 1 if exp(mean over the row's tokens of log(pi_old / pi_engine)) lies in [low, high], else 0 for the row."""

    low: float = 0.999
    high: float = 1.001

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        cut = rows.spread(self.is_outside(_exp(rows.mean(log_ratio))))
        return Corrected((~cut).to(log_ratio.dtype), cut)


def check_source(mismatch: Correction | None, old_logp_source: str) -> None:
    """Raises ConfigError (2004) for weights that would all be 1."""
    if mismatch is not None and old_logp_source == "rollout":
        raise InvalidValueError(
            "algorithm.mismatch weighs by pi_old / pi_engine, which is 1 with algorithm.old_logp_source=rollout. "
            "Use old_logp_source=replay, or leave mismatch out"
        )


@torch.no_grad()
def mismatch_metrics(
    log_ratio: Float[Tensor, "*elements"], corrected: Corrected, weights: Float[Tensor, "*elements"]
) -> Metrics:
    """The KL between engine and trainer, the mean weight and the fraction of cut elements. Weight 0 excludes one."""
    return {
        "train/mismatch_kl": mean_metric(k3(-log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), weights),
        "train/mismatch_weight": mean_metric(corrected.weights, weights),
        "train/mismatch_cut": mean_metric(corrected.cut.to(weights.dtype), weights),
    }


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
