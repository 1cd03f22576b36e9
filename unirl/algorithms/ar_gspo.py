"""GSPO: the clip of GRPO, applied to the importance ratio of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.shared.packed import Aggregation
from unirl.algorithms.shared.surrogate import sequence_log_ratio
from unirl.algorithms.shared.tokens import Tokens

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class GSPO(ARGRPO):
    """P = -min(s A, clip(s, 1 - low, 1 + high) A),  s = exp(mean over the row's tokens of log pi_theta - log pi_old).

    GSPO (arXiv:2507.18071, eq. 5 and 7) in its token form (eq. 13), which has the same gradient if a row has one
    advantage. A whole sequence is clipped, with a range about a thousand times smaller than that of a token ratio.
    `loss` is `TokenLoss.loss`; the surrogate is that of `ARGRPO` with another log-ratio.
    """

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    clip_range: float = 3e-4
    clip_range_high: float | None = 4e-4

    def log_ratio(self, tokens: Tokens) -> Float[Tensor, "sum_L"]:
        return sequence_log_ratio(tokens.log_ratio, tokens.rows)

    def trust_width(self) -> float | None:
        return None  # the parity gate compares single tokens, and this range is one for means over sequences
