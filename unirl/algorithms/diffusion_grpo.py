"""Flow-GRPO and its variants: a clipped policy gradient on denoising steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import LatentRows, Part
from unirl.algorithms.shared.checks import check_fractions
from unirl.algorithms.shared.denoising import DenoisingLoss, step_metrics
from unirl.algorithms.shared.surrogate import (
    ClippedRatio,
    clip_fractions,
    clipped_surrogate,
    guard_log_ratio,
    spread_metrics,
)
from unirl.config.errors import InvalidValueError
from unirl.models.denoising.stage import DiffusionStage, Replay
from unirl.types.protocols import Quantity, TrainingProgress
from unirl.types.results import Metric, Metrics
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class DiffusionGRPO(ClippedRatio[DiffusionStage, LatentSegment], DenoisingLoss):
    """P = -min(r A, clip(r, 1 - low, 1 + high) A),  r = exp(logp_theta - logp_old), the importance ratio of a step.

    Flow-GRPO (arXiv:2505.05470, eq. 6). A is the advantage of the sample; logp is the log-prob of a stochastic
    denoising step, nats, mean over latent elements. With another kernel or choice of steps this is DanceGRPO, MixGRPO,
    Flow-GRPO-Fast, Flow-CPS or DDPO; with `ratio: guard` it is GRPO-Guard.

    `loss` is `DenoisingLoss.loss` (shared/denoising.py): it replays the steps of a part and calls `policy_loss` below.
    The ratio is formed in `_log_ratio`; the equation is `clipped_surrogate` (shared/surrogate.py).
    """

    clip_range: float = 1e-4
    ratio: Literal["plain", "guard"] = "plain"
    """guard: log r = mean of z (mean_theta - mean_old), with mean 0 and without the step's std (GRPO-Guard)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions("1e-4 is usual", clip_range_high=self.clip_range_high)
        if self.ratio == "guard" and self.old_logp_source == "rollout":
            raise InvalidValueError(
                "algorithm.ratio=guard compares means, which an engine does not record: it needs "
                "algorithm.old_logp_source=replay"
            )

    @property
    def reads_density(self) -> bool:
        return self.ratio == "guard" or super().reads_density

    def old_quantities(self) -> tuple[Quantity, ...]:
        return ("mean",) if self.ratio == "guard" else ("logp",)

    def policy_loss(
        self, new: Replay, rows: LatentRows, part: Part, advantages: Float[Tensor, "B S"], now: TrainingProgress
    ) -> tuple[Float[Tensor, "B S"], Metrics]:
        weights = rows.weight[:, None].expand_as(new.logp)
        low, high = self.clip_at(now.progress)
        log_ratio = torch.where(weights > 0, self._log_ratio(new, rows, part), 0.0)
        above, below = log_ratio > math.log1p(high), log_ratio < math.log1p(-low)
        metrics = spread_metrics(log_ratio, weights, clip_fractions(above, below))
        metrics |= step_metrics("train/log_ratio", log_ratio.abs(), weights, part)
        metrics["train/clip_range"] = Metric.mean(low)
        return clipped_surrogate(log_ratio, advantages, low, high, self.dual_clip), metrics

    def _log_ratio(self, new: Replay, rows: LatentRows, part: Part) -> Tensor:
        """Log importance ratio [B, S]; its gradient is that of `new`."""
        if self.ratio == "plain":
            return new.logp - self.old_logp(new, rows, part)
        x_next = torch.stack([rows.segment.latents_at(step + 1) for step in part], dim=1).float()
        return guard_log_ratio(x_next, new.mean, self.anchor_or_self(rows, "old_mean", part, new.mean), new.std)
