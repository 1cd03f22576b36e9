"""The clipped surrogate and its telemetry: pure functions of log-ratios and advantages."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from unirl.types.results import Metric, Metrics

ClipSchedule = Literal["constant", "linear", "cosine"]


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO loss per element, to be summed by the caller. Schulman et al. 2017, eq. 7 (arXiv:1707.06347).

    L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),  r = exp(log_ratio)

    The ratio is clipped in log space, the same set: at a range of 1e-6, 1 + clip_high keeps one digit in float32.

    Args:
        log_ratio: [B, S] log pi_theta - log pi_old, nats; S = replayed steps, or tokens.
        advantages: [B, S] already expanded; detached here.
    """
    advantages = advantages.detach()
    inside = log_ratio.clamp(math.log1p(-clip_low), math.log1p(clip_high))
    # The maximum halves the gradient between equal branches: at ratio 1 both give -A, so the sum is exactly -A.
    return torch.maximum(-advantages * log_ratio.exp(), -advantages * inside.exp())


def clip_scale(schedule: ClipSchedule, progress: float) -> float:
    """The factor on the clip range at `progress` in [0, 1] of the run.

    constant 1, linear 1 - p / 2, cosine (1 + cos(pi p)) / 2.
    """
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress must lie in [0, 1], got {progress}")
    return {
        "constant": 1.0,
        "linear": 1.0 - 0.5 * progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[schedule]


def approx_kl(log_ratio: Tensor) -> Tensor:
    """The quadratic estimate of KL(pi_old || pi_theta) per element: log_ratio^2 / 2 (k2, Schulman 2020)."""
    return 0.5 * log_ratio.square()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of weights * values; an element of weight 0 counts nowhere, even if it is not finite."""
    return torch.where(weights > 0, weights * values, 0.0).sum()


@torch.no_grad()
def ratio_metrics(log_ratio: Tensor, weights: Tensor, clip_low: float, clip_high: float) -> Metrics:
    """How far the policy has moved from the anchor; no host sync.

    Args:
        log_ratio, weights: [B, S]; elements of weight 0 count nowhere.
    """
    log_ratio = torch.where(weights > 0, log_ratio, 0.0).float()
    above = (log_ratio > math.log1p(clip_high)).float()
    below = (log_ratio < math.log1p(-clip_low)).float()
    total = weights.sum()

    def mean(values: Tensor) -> Metric:
        return Metric((weights * values).sum(), total, "mean")

    return {
        "train/ratio_mean": mean(log_ratio.exp()),
        "train/ratio_std": Metric.std(log_ratio.expm1(), weights),
        "train/approx_kl": mean(approx_kl(log_ratio)),
        "train/clip_fraction": mean(above + below),
        "train/clip_fraction_high": mean(above),
        "train/clip_fraction_low": mean(below),
    }
