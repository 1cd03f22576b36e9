"""CISPO: the importance ratio is a clipped, detached weight, so every token has a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.algorithms.shared.surrogate import weighted_log_prob_loss
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class CISPO(TokenLoss):
    """P = -sg[clip(r, 1 - low, 1 + high)] A log pi_theta,  r = pi_theta / pi_old per token.

    r is the importance ratio, A the advantage, sg[] detaches. MiniMax-M1 (arXiv:2506.13585). Every token has a
    gradient; the clip only bounds the weight of a token whose probability has risen a lot. `loss` is `TokenLoss.loss`.
    """

    clip_range: float | None = None
    """Lower bound of the weight is 1 - clip_range; null = no lower bound, as in the paper."""
    clip_range_high: float = 4.0
    """Upper bound of the weight is 1 + clip_range_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_range is not None and not 0.0 < self.clip_range < 1.0:
            raise InvalidValueError(
                f"algorithm.clip_range must lie in (0, 1), got {self.clip_range}; leave it out for no lower bound"
            )
        if not 0.0 < self.clip_range_high < math.inf:
            raise InvalidValueError(
                f"algorithm.clip_range_high must be finite and > 0, got {self.clip_range_high}; 4 is usual"
            )

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        low, high = 1.0 - (1.0 if self.clip_range is None else self.clip_range), 1.0 + self.clip_range_high
        losses = weighted_log_prob_loss(tokens.log_ratio, tokens.logp, tokens.advantages, low, high)
        ratio = tokens.log_ratio.detach().exp()
        return Surrogate(losses, tokens.log_ratio, ratio > high, ratio < low)
