"""Reward-weighted regression: pre-training on the policy's own samples, the good ones more than the bad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from unirl.algorithms.base import START, LossResult, Part
from unirl.algorithms.shared.forward_process import (
    ForwardProcessLoss,
    check_coefficients,
    check_positive,
    mask_rows,
    mean_square,
)
from unirl.algorithms.shared.surrogate import mean_metric, weighted_sum
from unirl.config.errors import IncompatibleError
from unirl.models.denoising.stage import DiffusionStage
from unirl.types.protocols import REFERENCE, Needs, TrainingProgress
from unirl.types.rollout_resp import RolloutTrack


@dataclass(frozen=True, kw_only=True)
class DiffusionRWR(ForwardProcessLoss):
    """L = mean over rows and times of  w e(v) + velocity_coef |v - v_ref|^2,   e(v) = mean (v - u)^2.

    Reward-weighted regression (Peters & Schaal 2007). exponential: w = min(exp(A / temperature), max_weight), as in AWR
    (arXiv:1910.00177). reward: w = r itself, which must not be negative (arXiv:2302.12192). advantage: w = A, for
    estimators that give weights, such as `BestOfGroup`: then this is fine-tuning on the best sample of each group.
    """

    weighting: Literal["exponential", "reward", "advantage"] = "exponential"
    """What a sample weighs: exp(A / temperature), its reward, or its advantage as it is."""
    temperature: float = 1.0
    """Of `exponential`: small values look at the best samples only."""
    max_weight: float = 20.0
    """Bound of `exponential`."""
    velocity_coef: float = 0.0
    """Weight of the mean squared distance to the velocity of the policy at initialisation; 0 = none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(temperature=self.temperature, max_weight=self.max_weight)
        check_coefficients(velocity_coef=self.velocity_coef)

    @property
    def needs(self) -> Needs:
        # exp(0) and a reward are weights: a sample is fitted whatever the others are worth.
        return replace(super().needs, own_samples=False, advantages=self.weighting == "advantage")

    def velocity_penalties(self) -> Mapping[str, float]:
        return {REFERENCE: self.velocity_coef}

    def count(self, rows: RolloutTrack) -> float:
        # Called once per micro-batch, before it is on the device: a look at the rows costs nothing here.
        self._refuse_negative(rows)
        return super().count(rows)

    def loss(self, stage: DiffusionStage, rows: RolloutTrack, part: Part, now: TrainingProgress = START) -> LossResult:
        noised, weights = self.noised(rows, part), self.weights(rows, part)
        v = self.velocity(stage, rows, noised)
        error, worth = mean_square(v, noised.target), self._worth(rows, part)
        pull, metrics = self.velocity_penalty(rows, part, v)
        metrics |= {
            "train/policy_loss": mean_metric(worth * error, weights),
            "train/matching_error": mean_metric(error, weights),
            "train/sample_weight": mean_metric(worth, weights),
        }
        return LossResult(weighted_sum(worth * error + pull, weights), metrics, {"velocity": v.detach()})

    def _worth(self, rows: RolloutTrack, part: Part) -> Tensor:
        """[B, n] float64 w."""
        if self.weighting == "reward":
            assert rows.rewards is not None, "training needs rewards: score_and_attach comes before train_track"
            return mask_rows(rows, rows.rewards.double())[:, None].expand(-1, len(part))
        advantages = self.element_advantages(rows, part).double()
        if self.weighting == "advantage":
            return advantages
        return (advantages / self.temperature).exp().clamp(max=self.max_weight)

    def _refuse_negative(self, rows: RolloutTrack) -> None:
        """Raises ConfigError for a sample with a negative weight: away from a sample there is no optimum."""
        worth = self._worth(rows, (0,))[:, 0]
        bad = ((worth < 0) & (rows.weight > 0)).nonzero().flatten().tolist()
        if bad:
            raise IncompatibleError(
                f"algorithm.weighting={self.weighting} weighs a sample by its {self.weighting}, and that of "
                f"{rows.sample_ids[bad[0]]!r} is {float(worth[bad[0]]):g}: regression away from a sample has no "
                "optimum. Use weighting=exponential, or DiffusionAWM, which takes advantages of both signs"
            )
