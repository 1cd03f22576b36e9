"""Policy gradients on tokens with another trust region than the clip of GRPO. Each is one formula of a token's ratio.

    CISPO         the ratio is a clipped weight, so every token has a gradient
    GMPO          the geometric mean of clipped ratios of a row's tokens
    SAPO          a sigmoid of the ratio
    DRPO, SPO     a quadratic penalty on the ratio
    DPPO, CPPO    a token whose probability has moved too far loses its gradient, unless it moves back

In all formulas r = pi_theta / pi_old is the importance ratio of a token, A its advantage, and sg[] detaches.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.algorithms.shared.checks import check_above, check_fractions, check_key, check_positive
from unirl.algorithms.shared.packed import Aggregation, RowOffsets
from unirl.algorithms.shared.surrogate import sequence_log_ratio
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.types.protocols import TrainingProgress

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True, kw_only=True)
class CISPO(TokenLoss):
    """P = -sg[clip(r, 1 - low, 1 + high)] A log pi_theta. MiniMax-M1 (arXiv:2506.13585).

    Every token has a gradient; the clip only bounds the weight of a token whose probability has risen a lot.
    """

    clip_range: float | None = None
    """Lower bound of the weight is 1 - clip_range; null = no lower bound, as in the paper."""
    clip_range_high: float = 4.0
    """Upper bound of the weight is 1 + clip_range_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions("leave it out for no lower bound", clip_range=self.clip_range)
        check_positive("4 is usual", clip_range_high=self.clip_range_high)

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        low, high = 1.0 - (1.0 if self.clip_range is None else self.clip_range), 1.0 + self.clip_range_high
        ratio = tokens.log_ratio.detach().exp()
        losses = -ratio.clamp(low, high) * tokens.advantages * tokens.logp
        return Surrogate(losses, tokens.log_ratio, ratio > high, ratio < low)


@dataclass(frozen=True, kw_only=True)
class GMPO(TokenLoss):
    """P = -A exp(mean over the row's tokens of d_t),  d_t = log r_t, at most high if A > 0, at least -low if A < 0.

    GMPO (arXiv:2507.20673). The ratios are clipped one by one in log space, in the direction of the update. The weight
    of the row is their geometric mean, which is robust against a single outlier.
    """

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    clip_range: float = 0.4
    """Bound on -log r where A < 0, and on log r where A > 0 unless clip_range_high is given."""
    clip_range_high: float | None = None
    """Bound on log r where A > 0; null = clip_range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("0.4 is usual", clip_range=self.clip_range, clip_range_high=self.clip_range_high)

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        low, high = self.clip_range, self.clip_range if self.clip_range_high is None else self.clip_range_high
        log_ratio, good, bad = tokens.log_ratio, tokens.advantages > 0, tokens.advantages < 0
        pushed_down = torch.where(bad, log_ratio.clamp(min=-low), 0.0)
        clipped = torch.where(good, log_ratio.clamp(max=high), pushed_down)
        gain = sequence_log_ratio(clipped, tokens.rows)
        above, below = (log_ratio > high) & good, (log_ratio < -low) & bad
        return Surrogate(-tokens.advantages * gain.exp(), gain, above, below)


@dataclass(frozen=True, kw_only=True)
class SAPO(TokenLoss):
    """P = -A (4 / tau) sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg. SAPO (arXiv:2511.20347).

    The slope in r, which weighs a token's gradient, is 1 at r = 1 and falls to 0 on both sides, faster for negative
    advantages. There is no hard trust region, so the clip fractions are 0.
    """

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    tau_pos: float = 1.0
    """Steepness of the sigmoid where A > 0."""
    tau_neg: float = 1.05
    """Steepness of the sigmoid where A <= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0.0, "1 and 1.05 are usual", tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        log_ratio, advantages = tokens.log_ratio, tokens.advantages
        tau = torch.where(advantages > 0, torch.full_like(log_ratio, self.tau_pos), self.tau_neg)
        losses = -advantages * (4.0 / tau) * torch.sigmoid(tau * log_ratio.expm1())
        no_token = torch.zeros_like(tokens.rows.token_mask)
        return Surrogate(losses, log_ratio, no_token, no_token)


@dataclass(frozen=True, kw_only=True)
class DRPO(TokenLoss):
    """P = -A r + |A| mu (r - 1)^2 / (2 epsilon),  mu = sg[pi_old]. DRPO (arXiv:2606.09821).

    The gradient is -A r (1 - sign(A (r - 1)) |pi_theta - mu| / epsilon), which changes its sign where r is far from 1:
    a trust region of width epsilon in probability and epsilon / mu in the ratio. Without mu in the penalty it is SPO
    (arXiv:2401.16025).
    """

    drpo_epsilon: float = 12.5
    """Width of the trust region in |pi_theta - pi_old|, or for SPO in |r - 1| (0.2 is usual for SPO)."""
    penalty_mu_weighted: bool = True
    """Weigh the penalty by mu; false = SPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0.0, "12.5 is usual, 0.2 for SPO", drpo_epsilon=self.drpo_epsilon)

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        log_ratio, advantages = tokens.log_ratio, tokens.advantages
        mu = tokens.old_logp.exp() if self.penalty_mu_weighted else torch.ones_like(tokens.old_logp)
        penalty = mu / (2.0 * self.drpo_epsilon)
        losses = -advantages * log_ratio.exp() + advantages.abs() * penalty * log_ratio.expm1().square()
        beyond = mu * log_ratio.detach().expm1() / self.drpo_epsilon
        return Surrogate(losses, log_ratio, beyond > 1.0, beyond < -1.0)


@dataclass(frozen=True, kw_only=True)
class MaskedPolicyGradient(TokenLoss):
    """P = -A r where A (r - 1) <= 0 or the divergence is small, else 0; the factor r is at most `ratio_cap`.

    Where A (r - 1) <= 0, the update moves pi_theta back towards pi_old, or r = 1, or A = 0. A subclass says which
    tokens are within the trust region.
    """

    ratio_cap: float = 20.0
    """Largest weight of one token. A token of tiny probability can have a huge ratio and a small divergence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(1.0, "20 is usual", ratio_cap=self.ratio_cap)

    @abstractmethod
    def within_trust_region(self, tokens: Tokens) -> Bool[Tensor, "sum_L"]:
        """[sum L] bool, the divergence between pi_theta and pi_old at the token is small enough."""

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        log_ratio = tokens.log_ratio.detach()
        ratio = log_ratio.exp()
        own = (tokens.log_ratio - log_ratio).exp()  # value 1, gradient of log pi_theta
        moves_back = tokens.advantages * log_ratio <= 0
        masked = ~(moves_back | self.within_trust_region(tokens))
        losses = torch.where(masked, 0.0, -tokens.advantages * ratio.clamp(max=self.ratio_cap) * own)
        return Surrogate(losses, tokens.log_ratio, masked & (ratio > 1.0), masked & (ratio < 1.0))


@dataclass(frozen=True, kw_only=True)
class DPPO(MaskedPolicyGradient):
    """P = -A r, but 0 where A (r - 1) > 0 and D(pi_old, pi_theta) > delta,  D of "this token" against "another token".

    DPPO (arXiv:2602.04879). The trust region is one of probability: a rare token may have a large ratio because it
    moves little probability mass, and a likely token may not.
    """

    divergence: Literal["tv", "kl"] = "tv"
    """D: |pi_theta - mu|, or mu log(mu / pi_theta) + (1 - mu) log((1 - mu) / (1 - pi_theta)) nats; mu = pi_old."""
    delta: float = 0.15
    """Bound on D where a token has become less likely, and where more likely if delta_high is null."""
    delta_high: float | None = None
    """Bound on D where a token has become more likely; null = delta."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0.0, "0.15 is usual for tv", delta=self.delta, delta_high=self.delta_high)

    def within_trust_region(self, tokens: Tokens) -> Bool[Tensor, "sum_L"]:
        measure = binary_tv if self.divergence == "tv" else binary_kl
        high = self.delta if self.delta_high is None else self.delta_high
        moved = measure(tokens.logp, tokens.old_logp)
        return torch.where(tokens.log_ratio.detach() > 0, moved <= high, moved <= self.delta)


@dataclass(frozen=True, kw_only=True)
class CPPO(MaskedPolicyGradient):
    """P = -A r, but 0 where A (r - 1) > 0 and the divergence of the token, or of the prefix with it, is too large.

    CPPO (arXiv:2606.10968, eq. 8 to 11). The divergence of a token is bounded by delta and by the rest of a budget that
    grows along the response, because a prefix that has drifted makes all later tokens off-policy.
    """

    delta: float = 0.2
    """Bound on the weighted |pi_theta - pi_old| of one token."""
    w_min: float = 0.8
    """Weight of the last token's divergence; the first token has weight 1."""
    delta_b: float = 0.02
    """The budget per token is the row's 90th percentile of the divergence, clamped to [delta_b, 2 delta_b]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0.0, "0.2 and 0.02 are usual", delta=self.delta, delta_b=self.delta_b)
        check_key(0.0 < self.w_min <= 1.0, "algorithm.w_min", "lie in (0, 1]", self.w_min, "0.8 is usual")

    def within_trust_region(self, tokens: Tokens) -> Bool[Tensor, "sum_L"]:
        divergence = tokens.rows.masked(binary_tv(tokens.logp, tokens.old_logp))
        return within_prefix_budget(divergence, tokens.rows, self.delta, self.w_min, self.delta_b)


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
    earlier tokens, b = clip(90th percentile of D in the row, delta_b, 2 delta_b). CPPO, arXiv:2606.10968. Positions and
    percentile refer to counted tokens.
    """
    position = rows.before(torch.ones_like(divergence))
    last = rows.spread((rows.lengths - 1.0).clamp(min=1.0))
    weight = 1.0 - (1.0 - w_min) * position / last
    spent = weight * divergence.double()
    allowance = rows.spread(rows.quantile(divergence, 0.9).clamp(delta_b, 2.0 * delta_b))
    budget = delta + allowance * rows.before(weight) - rows.before(spent)
    return spent <= budget.clamp(max=delta)
