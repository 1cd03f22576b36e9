"""Flow-GRPO and its kin: a clipped policy gradient on denoising steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from unirl.algorithms.base import START, Columns, LossResult, Part, StageAlgorithm
from unirl.algorithms.surrogate import ClipSchedule, clip_scale, clipped_surrogate, ratio_metrics, weighted_sum
from unirl.config.errors import ConfigError
from unirl.models.diffusion import DiffusionStage
from unirl.types.protocols import Anchor, Moment, Needs
from unirl.types.results import Metric, Metrics
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment


@dataclass(frozen=True, kw_only=True)
class DiffusionGRPO(StageAlgorithm[DiffusionStage]):
    """L = mean over rows and stochastic steps of -min(r A, clip(r) A),  r = exp(logp_theta - logp_old).

    Flow-GRPO (arXiv:2505.05470, eq. 6) with log-probs averaged over latent elements. DanceGRPO, MixGRPO, Flow-GRPO-Fast
    and Flow-CPS are this loss with another kernel or another choice of steps.
    """

    clip_range: float = 1e-4
    """The ratio stays above 1 - clip_range, and below 1 + clip_range unless clip_range_high is given."""
    clip_range_high: float | None = None
    """The upper side, if it differs (DAPO's clip-higher)."""
    clip_schedule: ClipSchedule = "constant"
    """Both ranges over the run: constant, linear to one half, or cosine to zero."""
    old_logp_source: Literal["replay", "rollout"] = "replay"
    """pi_old: replayed by the trainer (ratio exactly 1 in the first update), or what the engine recorded."""
    steps_per_forward: int = 1
    """Denoising steps replayed in one forward: faster for small micro-batches, and takes the memory of more rows."""

    def __post_init__(self) -> None:
        for name, value in (("clip_range", self.clip_range), ("clip_range_high", self.clip_range_high)):
            if value is not None and not 0.0 < value < 1.0:
                raise ConfigError(f"algorithm.{name} must lie in (0, 1), got {value}; 1e-4 is usual", code=2004)
        if self.steps_per_forward < 1:
            raise ConfigError(f"algorithm.steps_per_forward must be >= 1, got {self.steps_per_forward}", code=2004)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, behaviour_logp=self.old_logp_source == "rollout")

    def anchors(self) -> Mapping[str, Anchor]:
        return {"old_logp": Anchor("live", "logp")} if self.old_logp_source == "replay" else {}

    def parts(self, segment: LatentSegment) -> list[Part]:
        steps, size = segment.sde_indices, self.steps_per_forward
        return [steps[i : i + size] for i in range(0, len(steps), size)]

    def measure(self, stage: DiffusionStage, rows: RolloutTrack, part: Part) -> Columns:
        return {"logp": stage.replay(rows.conditions, rows.segment, part).logp.detach()}

    def loss(self, stage: DiffusionStage, rows: RolloutTrack, part: Part, now: Moment = START) -> LossResult:
        logp = stage.replay(rows.conditions, rows.segment, part).logp  # [B, S']
        columns: Columns = {"logp": logp.detach()}
        if self.old_logp_source == "rollout":
            old = rows.segment.logp[:, rows.segment.columns_of(part)]
        else:
            old = self.anchor(rows, "old_logp", part)
        weights = rows.weight[:, None].expand_as(logp)
        log_ratio = torch.where(weights > 0, logp - (columns["logp"] if old is None else old), 0.0)
        low, high = self.clip_at(now.progress)
        losses = clipped_surrogate(log_ratio, self.expand(rows, part), low, high)
        metrics = ratio_metrics(log_ratio, weights, low, high) | {"train/clip_range": Metric.mean(low)}
        return LossResult(weighted_sum(losses, weights), metrics, columns)

    def trust_width(self) -> float:
        return min(self.clip_at(0.0))

    def parity(self, rows: RolloutTrack, part: Part, columns: Columns) -> Metrics:
        recorded = rows.segment.logp[:, rows.segment.columns_of(part)]
        gap = (recorded - columns["logp"]).abs() * (rows.weight > 0)[:, None]
        return {"rollout/parity_absdiff_max": Metric.max(gap.max())}

    def clip_at(self, progress: float) -> tuple[float, float]:
        """The clip range below and above 1."""
        scale = clip_scale(self.clip_schedule, progress)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return scale * self.clip_range, scale * high
