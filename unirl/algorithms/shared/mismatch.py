"""Mismatch correction: importance weights pi_old / pi_engine for tokens that an engine sampled with other numerics.

pi_old is the trainer's replay with the weights that sampled, so the ratio is 1 where engine and trainer agree. A loss
multiplies its surrogate by the detached weights. It still divides by the number of all tokens, so rejected tokens make
the gradient smaller; `train/mismatch_cut` logs their fraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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

    weights: Tensor  # [sum L] >= 0
    cut: Tensor  # [sum L] bool, the ratio of the token was bounded, or the token was rejected


class Correction(Protocol):
    """Turns log(pi_old / pi_engine) per token into weights. Pure."""

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        """The weights. `log_ratio` is finite, and 0 at tokens that are not counted."""


@dataclass(frozen=True, kw_only=True)
class TokenTIS:
    """w = min(pi_old / pi_engine, cap) per token: truncated importance sampling."""

    cap: float = 2.0
    """Upper bound of the weight."""

    def __post_init__(self) -> None:
        reason = "below 1 it would cut tokens on which engine and trainer agree; 2 is usual"
        check_key(self.cap >= 1.0, "algorithm.mismatch.cap", "be >= 1", self.cap, reason)

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        ratio = self.ratio(log_ratio, rows)
        return Corrected(ratio.clamp(max=self.cap), ratio > self.cap)

    def ratio(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Float[Tensor, "sum_L"]:
        """[sum L] the ratio to bound."""
        return _exp(log_ratio)


@dataclass(frozen=True, kw_only=True)
class SequenceTIS(TokenTIS):
    """w = min(product over the row's tokens of pi_old / pi_engine, cap), one weight per row. Unbiased below the cap."""

    def ratio(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Float[Tensor, "sum_L"]:
        return rows.spread(_exp(rows.sum(log_ratio))).to(log_ratio.dtype)


@dataclass(frozen=True, kw_only=True)
class MaskedIS:
    """w = pi_old / pi_engine within [low, high], else 0, per token: masked importance sampling, or IcePop."""

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

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        ratio = _exp(log_ratio)
        cut = self.is_outside(ratio)
        return Corrected(ratio.masked_fill(cut, 0.0), cut)

    def is_outside(self, ratio: Float[Tensor, "*elements"]) -> Bool[Tensor, "*elements"]:
        """True where the ratio is not accepted."""
        return (ratio < self.low) | (ratio > self.high)


@dataclass(frozen=True, kw_only=True)
class GeometricRejection(MaskedIS):
    """w = 1 if exp(mean over the row's tokens of log(pi_old / pi_engine)) lies in [low, high], else 0 for the row."""

    low: float = 0.999
    high: float = 1.001

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        cut = rows.spread(self.is_outside(_exp(rows.mean(log_ratio))))
        return Corrected((~cut).to(log_ratio.dtype), cut)


@torch.no_grad()
def mismatch_metrics(
    log_ratio: Float[Tensor, "sum_L"], corrected: Corrected, weights: Float[Tensor, "sum_L"]
) -> Metrics:
    """The KL between engine and trainer, the mean weight, and the fraction of cut tokens. Weight 0 excludes a token."""
    return {
        "train/mismatch_kl": mean_metric(k3(-log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), weights),
        "train/mismatch_weight": mean_metric(corrected.weights, weights),
        "train/mismatch_cut": mean_metric(corrected.cut.to(weights.dtype), weights),
    }


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
