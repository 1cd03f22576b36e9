"""GRPO on tokens, and GSPO. Other aggregations, clips and advantages make GRPO DAPO, Dr.GRPO, RLOO and REINFORCE++."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from unirl.algorithms.shared.packed import Aggregation
from unirl.algorithms.shared.surrogate import ClippedRatio, clipped_surrogate, sequence_log_ratio
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.models.language.stage import AnyTokenStage
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metric
from unirl.types.segments import PackedSegment

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class ARGRPO(ClippedRatio[AnyTokenStage, PackedSegment], TokenLoss):
    """P = -min(r A, clip(r, 1 - low, 1 + high) A),  r = pi_theta / pi_old per token; at most c |A| where A < 0.

    GRPO (arXiv:2402.03300, eq. 3) with PPO's clip. r is the importance ratio of a token, A the advantage. With
    other aggregations, clips and advantages this is DAPO (arXiv:2503.14476), Dr.GRPO (2503.20783), RLOO (2402.14740)
    and REINFORCE++ (2501.03262); docs/algorithms/ar/argrpo.md lists the keys.

    `loss` is `TokenLoss.loss` (shared/tokens.py), which forms log r in `TokenLoss.tokens`; the equation, with r,
    is `clipped_surrogate` (shared/surrogate.py).
    """

    clip_range: float = 0.2

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        low, high = self.clip_at(now.progress)
        log_ratio = self.log_ratio(tokens)
        if tokens.part_ratios is None:
            losses = clipped_surrogate(log_ratio, tokens.advantages, low, high, self.dual_clip)
        else:
            advantages = tokens.advantages[:, None].expand_as(tokens.part_ratios)
            losses = clipped_surrogate(tokens.part_ratios, advantages, low, high, self.dual_clip).mean(1)
        above, below = log_ratio > math.log1p(high), log_ratio < math.log1p(-low)
        return Surrogate(losses, log_ratio, above, below, {"train/clip_range": Metric.mean(low)})

    def log_ratio(self, tokens: Tokens) -> Float[Tensor, "sum_L"]:
        """[sum L] log of the ratio to clip."""
        return tokens.log_ratio


@dataclass(frozen=True, kw_only=True)
class GSPO(ARGRPO):
    """P = -min(s A, clip(s, 1 - low, 1 + high) A),  s = exp(mean over the row's tokens of log pi_theta - log pi_old).

    GSPO (arXiv:2507.18071, eq. 5 and 7) in its token form (eq. 13), which has the same gradient if a row has one
    advantage. A whole sequence is clipped, with a range about a thousand times smaller than that of a token ratio.
    """

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    clip_range: float = 3e-4
    clip_range_high: float | None = 4e-4

    def log_ratio(self, tokens: Tokens) -> Float[Tensor, "sum_L"]:
        return sequence_log_ratio(tokens.log_ratio, tokens.rows)

    def trust_width(self) -> float | None:
        return None  # the parity gate compares single tokens, and this range is one for means over sequences
