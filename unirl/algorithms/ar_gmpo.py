"""GMPO: the geometric mean of clipped importance ratios of a row's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.algorithms.shared.packed import Aggregation
from unirl.algorithms.shared.surrogate import one_sided_clip, sequence_log_ratio
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class GMPO(TokenLoss):
    """P = -A exp(mean over the row's tokens of d_t),  d_t = log r_t, at most high if A > 0, at least -low if A < 0.

    GMPO (arXiv:2507.20673). r_t is the importance ratio of a token, A the advantage. The ratios are clipped one
    by one in log space, and the weight of the row is their geometric mean, which is robust against a single outlier.
    `loss` is `TokenLoss.loss`.
    """

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    clip_range: float = 0.4
    """Bound on -log r where A < 0, and on log r where A > 0 unless clip_range_high is given."""
    clip_range_high: float | None = None
    """Bound on log r where A > 0; null = clip_range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("clip_range", self.clip_range), ("clip_range_high", self.clip_range_high)):
            if value is not None and not 0.0 < value < math.inf:
                raise InvalidValueError(f"algorithm.{name} must be finite and > 0, got {value}; 0.4 is usual")

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        low, high = self.clip_range, self.clip_range if self.clip_range_high is None else self.clip_range_high
        gain = sequence_log_ratio(one_sided_clip(tokens.log_ratio, tokens.advantages, low, high), tokens.rows)
        log_ratio = tokens.log_ratio.detach()
        above = (log_ratio > high) & (tokens.advantages > 0)
        below = (log_ratio < -low) & (tokens.advantages < 0)
        return Surrogate(-tokens.advantages * gain.exp(), gain, above, below)
