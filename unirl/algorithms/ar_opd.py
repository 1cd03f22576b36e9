"""On-policy distillation: a teacher scores every token of the student's own samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import Part, TokenRows
from unirl.algorithms.shared.checks import check_above
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.types.protocols import Anchor, Needs, TrainingProgress

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class AROPD(TokenLoss):
    """P = -sg[log pi_teacher - log pi_old] log pi_theta: the gradient of KL(pi_theta || teacher) at sampled states.

    The log-prob gap to the teacher is the advantage of a token; rewards are not used. Lu et al. 2025, "On-policy
    distillation"; Agarwal et al. 2024 (arXiv:2306.13649). `loss` is `TokenLoss.loss`.
    """

    supports_multi_update: ClassVar[bool] = False

    teacher: str = "teacher"
    """Name of the weight snapshot that is the teacher."""
    gap_clip: float | None = 5.0
    """Bound on the gap of one token, nats, so that no single token dominates the update; null = none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0.0, "null for no bound", gap_clip=self.gap_clip)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, advantages=False)

    def anchors(self) -> Mapping[str, Anchor]:
        return {**super().anchors(), "teacher_logp": Anchor(self.teacher, "logp")}

    def token_advantages(self, rows: TokenRows, part: Part, old_logp: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
        return self.filled_anchor(rows, "teacher_logp", part) - old_logp

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        gap = tokens.advantages
        bounded = gap if self.gap_clip is None else gap.clamp(-self.gap_clip, self.gap_clip)
        metrics = {"train/kl_teacher": mean_metric(-gap, tokens.weights)}
        no_token = torch.zeros_like(tokens.rows.token_mask)
        return Surrogate(-bounded * tokens.logp, tokens.log_ratio, no_token, no_token, metrics)
