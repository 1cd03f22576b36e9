"""Policy losses per element: surrogates of the importance ratio, and the metrics that describe the ratio.

The importance ratio r = pi_theta / pi_old = exp(log_ratio) compares the current policy with the one that sampled. It is
close to 1 as long as the sample is still on-policy; a trust region limits how far an update may move it. Every function
here is pure. The first half serves any element, S denoising steps of B samples or packed tokens; the second half serves
tokens, where pi = exp(logp), mu = exp(old_logp), A is the advantage and sg[] detaches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.algorithms.shared.kl import MAX_LOG_RATIO, element_means, k2
from unirl.algorithms.shared.packed import RowOffsets
from unirl.types.results import Metric, Metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

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


def masked_surrogate(
    log_ratio: Float[Tensor, "*elements"],
    advantages: Float[Tensor, "*elements"],
    divergence: Float[Tensor, "*elements"],
    threshold: float,
) -> tuple[Float[Tensor, "*elements"], Bool[Tensor, "*elements"]]:
    """Flow-DPPO's loss per element, and a bool mask of the dropped elements (arXiv:2606.11025). No clipping.

    L = -r A, but 0 where divergence >= threshold and the update would move r further away from 1

    Args:
        log_ratio: [B, S] log pi_theta - log pi_old, nats.
        advantages: [B, S] one per element; detached here.
        divergence: [B, S] between the old and the current policy, in the unit of `threshold`; detached here.
    """
    advantages = advantages.detach()
    away = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    dropped = (divergence.detach() >= threshold) & away
    # A dropped ratio may be infinite. It is replaced before exp, whose gradient would be 0 * inf.
    finite = torch.where(dropped, 0.0, log_ratio)
    return torch.where(dropped, 0.0, -advantages * finite.exp()), dropped


def guard_log_ratio(
    x_next: Float[Tensor, "B S *latent"],
    mean: Float[Tensor, "B S *latent"],
    old_mean: Float[Tensor, "B S *latent"],
    std: Float[Tensor, "S"],
) -> Float[Tensor, "B S"]:
    """[B, S] mean over latent elements of z (mean - old_mean),  z = (x_next - old_mean) / std.

    This is GRPO-Guard's RatioNorm (arXiv:2510.22319). It equals std (log r + KL): the log-ratio without its negative
    drift, scaled so that it does not depend on the noise level of the step.

    Args:
        x_next, mean, old_mean: [B, S, *latent].
        std: [S], of both means.
    """
    z = (x_next - old_mean) / along_steps(std, mean)
    return element_means(z * (mean - old_mean))


def along_steps(values: Float[Tensor, "S"], like: Float[Tensor, "B S *latent"]) -> Float[Tensor, "..."]:
    """`values` [S], reshaped to broadcast over `like` [B, S, *latent]."""
    return values.view(-1, *[1] * (like.dim() - 2))


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


def approx_kl(log_ratio: Float[Tensor, "*elements"]) -> Float[Tensor, "*elements"]:
    """The quadratic estimate of KL(pi_old || pi_theta) per element: log_ratio^2 / 2 (k2, Schulman 2020)."""
    return k2(log_ratio)


def weighted_sum(values: Float[Tensor, "*elements"], weights: Float[Tensor, "*elements"]) -> Float[Tensor, ""]:
    """[] the sum of weights * values. Elements of weight 0 are ignored, even if they are not finite."""
    return torch.where(weights > 0, weights * values, 0.0).sum()


@torch.no_grad()
def mean_metric(values: Float[Tensor, "*elements"], weights: Float[Tensor, "*elements"]) -> Metric:
    """The weighted mean of `values`; `weights` has the same shape."""
    return Metric(weighted_sum(values.detach(), weights), weights.sum(), "mean")


@torch.no_grad()
def ratio_metrics(
    log_ratio: Float[Tensor, "*elements"], weights: Float[Tensor, "*elements"], clip_low: float, clip_high: float
) -> Metrics:
    """Distribution of the importance ratio and the clipped fraction, without a host sync.

    Args:
        log_ratio, weights: [B, S]; elements of weight 0 are ignored.
    """
    above, below = log_ratio > math.log1p(clip_high), log_ratio < math.log1p(-clip_low)
    return spread_metrics(log_ratio, weights) | fraction_metrics(above, below, weights)


@torch.no_grad()
def spread_metrics(log_ratio: Float[Tensor, "*elements"], weights: Float[Tensor, "*elements"]) -> Metrics:
    """Mean and standard deviation of the importance ratio, and the approximate KL to the policy that sampled."""
    log_ratio = torch.where(weights > 0, log_ratio, 0.0).float()
    return {
        "train/ratio_mean": mean_metric(log_ratio.exp(), weights),
        "train/ratio_std": Metric.std(log_ratio.expm1(), weights),
        "train/approx_kl": mean_metric(approx_kl(log_ratio), weights),
    }


@torch.no_grad()
def fraction_metrics(
    above: Bool[Tensor, "*elements"], below: Bool[Tensor, "*elements"], weights: Float[Tensor, "*elements"]
) -> Metrics:
    """The fraction of elements above and below the trust region. `above`, `below`, `weights`: [B, S]."""
    return {
        "train/clip_fraction": mean_metric((above | below).float(), weights),
        "train/clip_fraction_high": mean_metric(above.float(), weights),
        "train/clip_fraction_low": mean_metric(below.float(), weights),
    }


# Losses and trust regions of tokens


def weighted_log_prob_loss(
    log_ratio: Float[Tensor, "sum_L"],
    logp: Float[Tensor, "sum_L"],
    advantages: Float[Tensor, "sum_L"],
    low: float,
    high: float,
) -> Float[Tensor, "sum_L"]:
    """-sg[clip(r, low, high)] A log pi per token. The weight is bounded, and every token has a gradient.

    CISPO, arXiv:2506.13585.

    Args:
        log_ratio, logp, advantages: [sum L].
    """
    weight = log_ratio.detach().exp().clamp(low, high)
    return -weight * advantages * logp


def quadratic_penalty_loss(
    log_ratio: Float[Tensor, "sum_L"], advantages: Float[Tensor, "sum_L"], penalty: Float[Tensor, "sum_L"] | float
) -> Float[Tensor, "sum_L"]:
    """-A r + |A| penalty (r - 1)^2 per token: a quadratic penalty replaces the clip.

    The gradient with respect to log pi is -A r (1 - 2 penalty sign(A) (r - 1)). It changes its sign where r is far
    from 1.
    """
    return -advantages * log_ratio.exp() + advantages.abs() * penalty * log_ratio.expm1().square()


def soft_gate_loss(
    log_ratio: Float[Tensor, "sum_L"], advantages: Float[Tensor, "sum_L"], tau_pos: float, tau_neg: float
) -> Float[Tensor, "sum_L"]:
    """-A (4 / tau) sigmoid(tau (r - 1)) per token. The slope in r is 1 at r = 1 and falls to 0 on both sides.

    tau = tau_pos where A > 0, else tau_neg. SAPO, arXiv:2511.20347.
    """
    tau = torch.where(advantages > 0, torch.full_like(log_ratio, tau_pos), tau_neg)
    return -advantages * (4.0 / tau) * torch.sigmoid(tau * log_ratio.expm1())


def sequence_log_ratio(log_ratio: Float[Tensor, "sum_L"], rows: RowOffsets) -> Float[Tensor, "sum_L"]:
    """[sum L] the mean of log r_t over the row as value, with the gradient of each token's own log r_t (GSPO-token).

    Averaged over the tokens of a row, a loss of it has the value and the gradient of the same loss of the row's mean
    log-ratio. It also allows a different advantage per token. Zheng et al. 2025, eq. 14 (arXiv:2507.18071).
    """
    mean = rows.spread(rows.mean(log_ratio.detach())).to(log_ratio.dtype)
    return mean + (log_ratio - log_ratio.detach())


def one_sided_clip(
    log_ratio: Float[Tensor, "sum_L"], advantages: Float[Tensor, "sum_L"], low: float, high: float
) -> Float[Tensor, "sum_L"]:
    """log r per token, clipped in the direction of the update: at most `high` if A > 0, at least -low if A < 0."""
    pushed_down = torch.where(advantages < 0, log_ratio.clamp(min=-low), 0.0)
    return torch.where(advantages > 0, log_ratio.clamp(max=high), pushed_down)


def moves_towards_old(log_ratio: Float[Tensor, "sum_L"], advantages: Float[Tensor, "sum_L"]) -> Bool[Tensor, "sum_L"]:
    """bool per token: A (r - 1) <= 0, so the update moves pi back towards mu, or r = 1, or A = 0."""
    return advantages * log_ratio.detach() <= 0


def binary_tv(logp: Float[Tensor, "sum_L"], old_logp: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
    """|pi - mu| per token: the total variation between the events "this token" and "another token"."""
    return (logp.detach().exp() - old_logp.exp()).abs()


def binary_kl(logp: Float[Tensor, "sum_L"], old_logp: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) per token, nats: KL(mu || pi) of the same two events."""
    logp = logp.detach()
    other, old_other = -torch.expm1(logp), -torch.expm1(old_logp)  # 1 - pi, 1 - mu
    return old_logp.exp() * (old_logp - logp) + old_other * torch.log((old_other + 1e-8) / (other + 1e-8))


def within_prefix_budget(
    divergence: Float[Tensor, "sum_L"], rows: RowOffsets, delta: float, w_min: float, delta_b: float
) -> Bool[Tensor, "sum_L"]:
    """bool per token: Z_t <= min(delta, delta + b W_{<t} - Z_{<t}), which bounds the divergence of every prefix.

    Z_t = w_t D_t with the position weights w_t = 1 - (1 - w_min) (t - 1) / (n - 1), W_{<t} and Z_{<t} the sums over
    earlier tokens, b = clip(90th percentile of D in the row, delta_b, 2 delta_b). CPPO, arXiv:2606.10968.

    Args:
        divergence: [sum L] D_t >= 0. Positions and percentile refer to counted tokens.
    """
    position = rows.before(torch.ones_like(divergence))
    last = rows.spread((rows.lengths - 1.0).clamp(min=1.0))
    weight = 1.0 - (1.0 - w_min) * position / last
    spent = weight * divergence.double()
    allowance = rows.spread(rows.quantile(divergence, 0.9).clamp(delta_b, 2.0 * delta_b))
    budget = delta + allowance * rows.before(weight) - rows.before(spent)
    return spent <= budget.clamp(max=delta)
