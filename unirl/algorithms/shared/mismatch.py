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

from unirl.algorithms.shared.kl import MAX_LOG_RATIO, k3
from unirl.algorithms.shared.packed import RowOffsets
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.config.errors import InvalidValueError
from unirl.types.results import Metrics

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Corrected:
    """The result of a correction."""

    weights: Tensor  # [sum L] >= 0
    cut: Tensor  # [sum L] bool, the ratio of the token was bounded, or the token was rejected


class Correction(Protocol):
    """Turns log(pi_old / pi_engine) per token into weights. Pure."""

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        """
        Args:
            log_ratio: [sum L] finite, 0 at tokens that are not counted.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TokenTIS:
    """w = min(pi_old / pi_engine, cap) per token: truncated importance sampling."""

    cap: float = 2.0
    """Upper bound of the weight."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        ratio = _exp(log_ratio)
        return Corrected(ratio.clamp(max=self.cap), ratio > self.cap)


@dataclass(frozen=True, kw_only=True)
class SequenceTIS:
    """w = min(product over the row's tokens of pi_old / pi_engine, cap), one weight per row. Unbiased below the cap."""

    cap: float = 2.0
    """Upper bound of the weight."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        ratio = rows.spread(_exp(rows.sum(log_ratio))).to(log_ratio.dtype)
        return Corrected(ratio.clamp(max=self.cap), ratio > self.cap)


@dataclass(frozen=True, kw_only=True)
class MaskedIS:
    """w = pi_old / pi_engine within [low, high], else 0, per token: masked importance sampling, or IcePop."""

    low: float = 0.5
    """Smallest ratio that is accepted."""
    high: float = 2.0
    """Largest ratio that is accepted."""

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        ratio = _exp(log_ratio)
        cut = (ratio < self.low) | (ratio > self.high)
        return Corrected(ratio.masked_fill(cut, 0.0), cut)


@dataclass(frozen=True, kw_only=True)
class GeometricRejection:
    """w = 1 if exp(mean over the row's tokens of log(pi_old / pi_engine)) lies in [low, high], else 0 for the row."""

    low: float = 0.999
    """Smallest mean ratio that is accepted."""
    high: float = 1.001
    """Largest mean ratio that is accepted."""

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Corrected:
        ratio = _exp(rows.mean(log_ratio))
        cut = rows.spread((ratio < self.low) | (ratio > self.high))
        return Corrected((~cut).to(log_ratio.dtype), cut)


@torch.no_grad()
def mismatch_metrics(
    log_ratio: Float[Tensor, "sum_L"], corrected: Corrected, weights: Float[Tensor, "sum_L"]
) -> Metrics:
    """The KL between engine and trainer, the mean weight, and the fraction of cut tokens.

    Args:
        log_ratio: [sum L] log(pi_old / pi_engine), finite.
        weights: [sum L]; tokens of weight 0 are ignored.
    """
    return {
        "train/mismatch_kl": mean_metric(k3(-log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), weights),
        "train/mismatch_weight": mean_metric(corrected.weights, weights),
        "train/mismatch_cut": mean_metric(corrected.cut.to(weights.dtype), weights),
    }


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_cap(cap: float) -> None:
    if not cap >= 1.0:
        raise InvalidValueError(
            f"algorithm.mismatch.cap must be >= 1, got {cap}: below 1 it would cut tokens on which engine and trainer "
            "agree; 2 is usual"
        )


def _check_band(low: float, high: float) -> None:
    if not 0.0 <= low < 1.0 < high:
        raise InvalidValueError(
            f"algorithm.mismatch.low={low} and high={high} must enclose 1, the ratio of an engine that agrees with the "
            "trainer: 0 <= low < 1 < high"
        )
