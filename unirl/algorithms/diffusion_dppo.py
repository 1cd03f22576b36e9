"""Flow-DPPO: a policy gradient on denoising steps, with a trust region on the exact KL instead of the ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.algorithms.base import LatentRows, Part
from unirl.algorithms.shared.checks import check_key
from unirl.algorithms.shared.denoising import DenoisingLoss, step_metrics
from unirl.algorithms.shared.kl import gaussian_kl
from unirl.algorithms.shared.surrogate import clip_fractions, masked_surrogate, spread_metrics
from unirl.models.denoising.stage import Replay
from unirl.types.protocols import Quantity, TrainingProgress
from unirl.types.results import Metric, Metrics

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class DiffusionDPPO(DenoisingLoss):
    """P = -r A, but 0 where D >= kl_threshold and (r > 1 and A > 0, or r < 1 and A < 0).

    r = exp(logp_theta - logp_old) is the importance ratio of a step, A the advantage of the sample, and D = mean over
    latent elements of (mean_theta - mean_old)^2 / (2 std^2) the exact KL of the step between the old policy and this
    one. Flow-DPPO, arXiv:2606.11025. Masked elements have loss 0 and stay in the denominator. `loss` is
    `DenoisingLoss.loss`.
    """

    kl_threshold: float = 1e-5
    """Threshold of D, nats, mean over latent elements (the paper uses the sum)."""
    add_kl_coefficient: bool = True
    """Divide the squared difference of the means by 2 std^2 of the step; false = by 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key(self.kl_threshold >= 0.0, "algorithm.kl_threshold", "be >= 0", self.kl_threshold, "1e-5 is usual")

    def old_quantities(self) -> tuple[Quantity, ...]:
        return ("logp", "mean")

    def policy_loss(
        self, new: Replay, rows: LatentRows, part: Part, advantages: Float[Tensor, "B S"], now: TrainingProgress
    ) -> tuple[Float[Tensor, "B S"], Metrics]:
        weights = rows.weight[:, None].expand_as(new.logp)
        log_ratio = torch.where(weights > 0, new.logp - self.old_logp(new, rows, part), 0.0)
        std = new.std if self.add_kl_coefficient else torch.ones_like(new.std)
        divergence = gaussian_kl(new.mean.detach(), self.anchor_or_self(rows, "old_mean", part, new.mean), std)
        losses, masked = masked_surrogate(log_ratio, advantages, divergence, self.kl_threshold)
        clips = clip_fractions(masked & (log_ratio > 0), masked & (log_ratio < 0))
        metrics = spread_metrics(log_ratio, weights, {**clips, "train/kl_old": divergence})
        metrics |= step_metrics("train/log_ratio", log_ratio.abs(), weights, part)
        metrics["train/kl_old_max"] = Metric.max(torch.where(weights > 0, divergence, 0.0).max())
        return losses, metrics

    def trust_width(self) -> float | None:
        # The mean log-ratio of a step with divergence D is -D.
        return self.kl_threshold if self.add_kl_coefficient and self.kl_threshold > 0 else None
