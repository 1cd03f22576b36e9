"""DPPO and CPPO: a token whose probability has moved too far loses its gradient, unless it moves back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.algorithms.shared.surrogate import binary_kl, binary_tv, moves_towards_old, within_prefix_budget
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress

if TYPE_CHECKING:
    from jaxtyping import Bool


@dataclass(frozen=True, kw_only=True)
class MaskedPolicyGradient(TokenLoss):
    """P = -A r where A (r - 1) <= 0 or the divergence is small, else 0; the factor r is at most `ratio_cap`.

    r = pi_theta / pi_old is the importance ratio of a token, A the advantage. A subclass says which tokens are
    within the trust region. `loss` is `TokenLoss.loss`.
    """

    ratio_cap: float = 20.0
    """Largest weight of one token. A token of tiny probability can have a huge ratio and a small divergence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratio_cap > 1.0:
            raise InvalidValueError(f"algorithm.ratio_cap must be > 1, got {self.ratio_cap}; 20 is usual")

    @abstractmethod
    def within_trust_region(self, tokens: Tokens) -> Bool[Tensor, "sum_L"]:
        """[sum L] bool, the divergence between pi_theta and pi_old at the token is small enough."""

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        ratio = tokens.log_ratio.detach().exp()
        own = (tokens.log_ratio - tokens.log_ratio.detach()).exp()  # value 1, gradient of log pi_theta
        dropped = ~(moves_towards_old(tokens.log_ratio, tokens.advantages) | self.within_trust_region(tokens))
        losses = torch.where(dropped, 0.0, -tokens.advantages * ratio.clamp(max=self.ratio_cap) * own)
        return Surrogate(losses, tokens.log_ratio, dropped & (ratio > 1.0), dropped & (ratio < 1.0))


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
        for name, value in (("delta", self.delta), ("delta_high", self.delta_high)):
            if value is not None and not value > 0.0:
                raise InvalidValueError(f"algorithm.{name} must be > 0, got {value}; 0.15 is usual for tv")

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
        for name, value in (("delta", self.delta), ("delta_b", self.delta_b)):
            if not value > 0.0:
                raise InvalidValueError(f"algorithm.{name} must be > 0, got {value}; 0.2 and 0.02 are usual")
        if not 0.0 < self.w_min <= 1.0:
            raise InvalidValueError(f"algorithm.w_min must lie in (0, 1], got {self.w_min}; 0.8 is usual")

    def within_trust_region(self, tokens: Tokens) -> Bool[Tensor, "sum_L"]:
        divergence = tokens.rows.masked(binary_tv(tokens.logp, tokens.old_logp))
        return within_prefix_budget(divergence, tokens.rows, self.delta, self.w_min, self.delta_b)
