"""Policy losses per element: surrogates of the importance ratio, and the metrics that describe the ratio.

The importance ratio r = pi_theta / pi_old = exp(log_ratio) compares the current policy with the one that sampled. It is
close to 1 as long as the sample is still on-policy; a trust region limits how far an update may move it. Every function
here is pure. An element is one of S denoising steps of B samples, or a packed token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import PolicyGradient, SegmentT, StageT
from unirl.algorithms.shared.checks import check_above, check_fractions, check_positive
from unirl.algorithms.shared.kl import MAX_LOG_RATIO, element_means, k2
from unirl.algorithms.shared.packed import RowOffsets
from unirl.types.results import Metric, Metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped

ClipSchedule = Literal["constant", "linear", "cosine"]


def clipped_surrogate(
    log_ratio: Float[Tensor, "*elements"],
    advantages: Float[Tensor, "*elements"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, "*elements"]:
    """PPO loss per element, to be summed by the caller. Schulman et al. 2017, eq. 7 (arXiv:1707.06347).

    L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),  r = exp(log_ratio)

    With a dual clip c, L <= c |A| where A < 0: beyond r = c a bad sample has no gradient (arXiv:1912.09729, eq. 5).
    The ratio is clipped in log space, which is the same set: with a range of 1e-6, the float32 number 1 + clip_high has
    only one significant digit of the range.

    Args:
        log_ratio: log pi_theta - log pi_old, nats, clamped to +-20. [B, S] over replayed steps, or [sum L] over packed
            tokens.
        advantages: one per element, of the same shape; detached here.
    """
    advantages = advantages.detach()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inside = log_ratio.clamp(math.log1p(-clip_low), math.log1p(clip_high))
    # torch.maximum halves the gradient between equal branches. At ratio 1 both give -A, so their sum is exactly -A.
    losses = torch.maximum(-advantages * log_ratio.exp(), -advantages * inside.exp())
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


@dataclass(frozen=True, kw_only=True)
class ClippedRatio(PolicyGradient[StageT, SegmentT]):
    """The recipe keys of a loss with `clipped_surrogate`."""

    clip_range: float
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""
    clip_range_high: float | None = None
    """Upper side of the clip range (DAPO's clip-higher); null = clip_range."""
    clip_schedule: ClipSchedule = "constant"
    """Factor of both sides over the run: constant, linear to one half, or cosine to zero."""
    dual_clip: float | None = None
    """c > 1: where A < 0 the loss is at most c |A|; null = no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions("1e-4 is usual for denoising, 0.2 for tokens", clip_range=self.clip_range)
        check_positive("null for clip_range", clip_range_high=self.clip_range_high)
        check_above(1.0, "3 is usual", dual_clip=self.dual_clip)

    def clip_at(self, progress: float) -> tuple[float, float]:
        """The clip range below and above 1, at `progress` of the run."""
        scale = clip_scale(self.clip_schedule, progress)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return scale * self.clip_range, scale * high

    def trust_width(self) -> float | None:
        return min(self.clip_at(0.0))


def masked_surrogate(
    log_ratio: Float[Tensor, "*elements"],
    advantages: Float[Tensor, "*elements"],
    divergence: Float[Tensor, "*elements"],
    threshold: float,
) -> tuple[Float[Tensor, "*elements"], Bool[Tensor, "*elements"]]:
    """Flow-DPPO's loss per element, and a bool mask of the elements without gradient (arXiv:2606.11025). No clipping.

    L = -r A, but 0 where divergence >= threshold and the update would move r further away from 1

    `log_ratio` is log pi_theta - log pi_old, nats. Advantages and divergence are detached here.
    """
    advantages = advantages.detach()
    away = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    masked = (divergence.detach() >= threshold) & away
    # A masked ratio may be infinite. It is replaced before exp, whose gradient would be 0 * inf.
    finite = torch.where(masked, 0.0, log_ratio)
    return torch.where(masked, 0.0, -advantages * finite.exp()), masked


def guard_log_ratio(
    x_next: Float[Tensor, "B S *latent"],
    mean: Float[Tensor, "B S *latent"],
    old_mean: Float[Tensor, "B S *latent"],
    std: Float[Tensor, "S"],
) -> Float[Tensor, "B S"]:
    """[B, S] mean over latent elements of z (mean - old_mean),  z = (x_next - old_mean) / std.

    This is GRPO-Guard's RatioNorm (arXiv:2510.22319). It equals std (log r + KL): the log-ratio without its negative
    drift, scaled so that it does not depend on the noise level of the step. Both means have the same std.
    """
    z = (x_next - old_mean) / std.view(-1, *[1] * (mean.dim() - 2))
    return element_means(z * (mean - old_mean))


def clip_scale(schedule: ClipSchedule, progress: float) -> float:
    """The factor of the clip range, or of another coefficient, at `progress` in [0, 1] of the run.

    constant 1, linear 1 - p / 2, cosine (1 + cos(pi p)) / 2.
    """
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress must lie in [0, 1], got {progress}")
    return {
        "constant": 1.0,
        "linear": 1.0 - 0.5 * progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[schedule]


def weighted_sum(values: Float[Tensor, "*elements"], weights: Float[Tensor, "*elements"]) -> Float[Tensor, ""]:
    """[] the sum of weights * values. Elements of weight 0 are ignored, even if they are not finite."""
    return torch.where(weights > 0, weights * values, 0.0).sum()


def mean_metric(values: Float[Tensor, "*elements"], weights: Float[Tensor, "*elements"]) -> Metric:
    """The weighted mean of `values`; `weights` has the same shape. Elements of weight 0 are ignored."""
    [metric] = element_metrics({"mean": values}, {}, weights).values()
    return metric


@torch.no_grad()
def element_metrics(
    means: Mapping[str, Shaped[Tensor, "*elements"]],
    stds: Mapping[str, Float[Tensor, "*elements"]],
    weights: Float[Tensor, "*elements"],
) -> Metrics:
    """The weighted means of some values, and `Metric.std` of others, in one pass; all have the shape of `weights`.

    Elements of weight 0 are ignored, even if they are not finite.
    """
    stacked = torch.stack([*means.values(), *stds.values()])
    values = stacked.masked_fill(~(weights > 0), 0.0).flatten(1)
    weighted, weight = weights.flatten() * values, weights.sum().double()
    totals = weighted.sum(1).double().unbind()
    metrics = {name: Metric(total, weight, "mean") for name, total in zip(means, totals, strict=False)}
    if stds:
        squares = (weighted * values)[len(means) :].sum(1).double().unbind()
        for name, total, square in zip(stds, totals[len(means) :], squares, strict=True):
            metrics[name] = Metric(total, weight, "std", square)
    return metrics


@torch.no_grad()
def spread_metrics(
    log_ratio: Float[Tensor, "*elements"],
    weights: Float[Tensor, "*elements"],
    means: Mapping[str, Shaped[Tensor, "*elements"]] = MappingProxyType({}),
) -> Metrics:
    """Mean and standard deviation of the importance ratio, and the approximate KL to the policy that sampled.

    Args:
        means: further values whose weighted means become metrics, such as `clip_fractions`.
    """
    log_ratio = log_ratio.masked_fill(~(weights > 0), 0.0).float()
    own = {"train/ratio_mean": log_ratio.exp(), "train/approx_kl": k2(log_ratio)}
    return element_metrics({**own, **means}, {"train/ratio_std": log_ratio.expm1()}, weights)


def clip_fractions(
    above: Bool[Tensor, "*elements"], below: Bool[Tensor, "*elements"]
) -> dict[str, Bool[Tensor, "*elements"]]:
    """The elements outside, above and below the trust region, by the metrics that their weighted means are."""
    return {
        "train/clip_fraction": above | below,
        "train/clip_fraction_high": above,
        "train/clip_fraction_low": below,
    }


def sequence_log_ratio(log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Float[Tensor, "sum_L"]:
    """[sum L] the mean of log r_t over the row as value, with the gradient of each token's own log r_t (GSPO-token).

    Averaged over the tokens of a row, a loss of it has the value and the gradient of the same loss of the row's mean
    log-ratio. It also allows a different advantage per token. Zheng et al. 2025, eq. 14 (arXiv:2507.18071).
    """
    mean = rows.spread(rows.mean(log_ratio.detach())).to(log_ratio.dtype)
    return mean + (log_ratio - log_ratio.detach())
