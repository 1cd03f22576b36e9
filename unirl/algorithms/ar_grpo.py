"""GRPO on tokens. Other aggregations, clips and advantages make it DAPO, Dr.GRPO, RLOO and REINFORCE++."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from unirl.algorithms.shared.surrogate import ClipSchedule, clip_scale, clipped_surrogate
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metric

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class ARGRPO(TokenLoss):
    """P = -min(r A, clip(r, 1 - low, 1 + high) A),  r = pi_theta / pi_old per token; at most c |A| where A < 0.

    GRPO (arXiv:2402.03300, eq. 3) with PPO's clip. r is the importance ratio of a token, A the advantage. With
    other aggregations, clips and advantages this is DAPO (arXiv:2503.14476), Dr.GRPO (2503.20783), RLOO (2402.14740)
    and REINFORCE++ (2501.03262); docs/algorithms/ar/argrpo.md lists the keys.

    `loss` is `TokenLoss.loss` (shared/tokens.py), which forms r in `TokenLoss.tokens`; the equation is
    `clipped_surrogate` (shared/surrogate.py).
    """

    clip_range: float = 0.2
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""
    clip_range_high: float | None = None
    """Upper side of the clip range (DAPO's clip-higher: 0.28); null = clip_range."""
    clip_schedule: ClipSchedule = "constant"
    """Factor of both sides over the run: constant, linear to one half, or cosine to zero."""
    dual_clip: float | None = None
    """c > 1: where A < 0 the loss is at most c |A|; null = no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.clip_range < 1.0:
            raise InvalidValueError(f"algorithm.clip_range must lie in (0, 1), got {self.clip_range}; 0.2 is usual")
        if self.clip_range_high is not None and not 0.0 < self.clip_range_high < math.inf:
            raise InvalidValueError(
                f"algorithm.clip_range_high must be finite and > 0, got {self.clip_range_high}; 0.28 is usual"
            )
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise InvalidValueError(f"algorithm.dual_clip must be > 1, got {self.dual_clip}; 3 is usual")

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        low, high = self.clip_at(now.progress)
        log_ratio = self.log_ratio(tokens)
        losses = clipped_surrogate(log_ratio, tokens.advantages, low, high, self.dual_clip)
        above, below = log_ratio > math.log1p(high), log_ratio < math.log1p(-low)
        return Surrogate(losses, log_ratio, above, below, {"train/clip_range": Metric.mean(low)})

    def log_ratio(self, tokens: Tokens) -> Float[Tensor, "sum_L"]:
        """[sum L] log of the ratio to clip."""
        return tokens.log_ratio

    def trust_width(self) -> float | None:
        return min(self.clip_at(0.0))

    def clip_at(self, progress: float) -> tuple[float, float]:
        """The clip range below and above 1, at `progress` of the run."""
        scale = clip_scale(self.clip_schedule, progress)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return scale * self.clip_range, scale * high
