"""DPPO and CPPO: tokens that have moved too far in probability lose their gradient, unless it brings them back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.shared.surrogate import binary_kl, binary_tv, moves_towards_old, within_prefix_budget
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class MaskedPolicyGradient(TokenLoss):
    """P = -A r where A (r - 1) <= 0 or the divergence is small, else 0; r weighs a token by at most `ratio_cap`."""

    ratio_cap: float = 20.0
    """Largest weight of one token: a token of tiny probability may pass the test with a huge ratio."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratio_cap > 1.0:
            raise InvalidValueError(f"algorithm.ratio_cap must be > 1, got {self.ratio_cap}; 20 is usual")

    @abstractmethod
    def within_trust_region(self, tokens: Tokens) -> Tensor:
        """[sum L] bool, pi_theta is close enough to pi_old."""

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        ratio = tokens.log_ratio.detach().exp()
        own = (tokens.log_ratio - tokens.log_ratio.detach()).exp()  # 1, with the gradient of log pi_theta
        dropped = ~(moves_towards_old(tokens.log_ratio, tokens.advantages) | self.within_trust_region(tokens))
        losses = torch.where(dropped, 0.0, -tokens.advantages * ratio.clamp(max=self.ratio_cap) * own)
        return Surrogate(losses, tokens.log_ratio, dropped & (ratio > 1.0), dropped & (ratio < 1.0))


@dataclass(frozen=True, kw_only=True)
class DPPO(MaskedPolicyGradient):
    """P = -A r, but 0 where A (r - 1) > 0 and D(pi_old, pi_theta) > delta,  D between the token and all others.

    DPPO (arXiv:2602.04879): a trust region in probability, so a rare token is not clipped for a large ratio that moves
    no mass, and a likely one is clipped for a small ratio that moves much.
    """

    divergence: Literal["tv", "kl"] = "tv"
    """D: |pi_theta - mu|, or mu log(mu / pi_theta) + (1 - mu) log((1 - mu) / (1 - pi_theta)) nats; mu = pi_old."""
    delta: float = 0.15
    """The bound on D where a token has become less likely, and more likely unless delta_high is given."""
    delta_high: float | None = None
    """The bound where a token has become more likely, if it differs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("delta", self.delta), ("delta_high", self.delta_high)):
            if value is not None and not value > 0.0:
                raise InvalidValueError(f"algorithm.{name} must be > 0, got {value}; 0.15 is usual for tv")

    def within_trust_region(self, tokens: Tokens) -> Tensor:
        measure = binary_tv if self.divergence == "tv" else binary_kl
        high = self.delta if self.delta_high is None else self.delta_high
        moved = measure(tokens.logp, tokens.old_logp)
        return torch.where(tokens.log_ratio.detach() > 0, moved <= high, moved <= self.delta)


@dataclass(frozen=True, kw_only=True)
class CPPO(MaskedPolicyGradient):
    """P = -A r, but 0 where A (r - 1) > 0 and the token, or the prefix before it, has spent its divergence.

    CPPO (arXiv:2606.10968, eq. 8 to 11): a token's divergence is bounded by delta and by what is left of a budget that
    grows along the response, since a prefix that has drifted makes everything after it off-policy.
    """

    delta: float = 0.2
    """The bound on one token's weighted |pi_theta - pi_old|."""
    w_min: float = 0.8
    """Weight of the last token's divergence; the first has 1."""
    delta_b: float = 0.02
    """The budget per token is a row's 90th percentile of the divergence, within delta_b and twice that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("delta", self.delta), ("delta_b", self.delta_b)):
            if not value > 0.0:
                raise InvalidValueError(f"algorithm.{name} must be > 0, got {value}; 0.2 and 0.02 are usual")
        if not 0.0 < self.w_min <= 1.0:
            raise InvalidValueError(f"algorithm.w_min must lie in (0, 1], got {self.w_min}; 0.8 is usual")

    def within_trust_region(self, tokens: Tokens) -> Tensor:
        divergence = tokens.rows.masked(binary_tv(tokens.logp, tokens.old_logp))
        return within_prefix_budget(divergence, tokens.rows, self.delta, self.w_min, self.delta_b)
