"""DiffusionNFT: regression in the forward process raises or lowers the likelihood of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from unirl.algorithms.base import START, LossResult, Part, PolicyOutputs
from unirl.algorithms.shared.forward_process import (
    ForwardProcessLoss,
    Noised,
    check_coefficients,
    check_positive,
    mean_square,
    velocity_metric,
)
from unirl.algorithms.shared.kl import element_means
from unirl.algorithms.shared.surrogate import mean_metric, weighted_sum
from unirl.models.denoising.stage import DiffusionStage
from unirl.types.protocols import REFERENCE, Anchor, TrainingProgress
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]

MIN_ADAPTIVE_WEIGHT = 1e-5
"""Lower bound of the adaptive weight, which is 0 for an exact prediction."""


def optimality(
    advantages: Float[Tensor, "*elements"], clip_max: float, mode: AdvantageMode = "all"
) -> Float[Tensor, "*elements"]:
    """q = clip((A / clip_max + 1) / 2, 0, 1), the probability that a sample is good; 1/2 is neutral.

    Args:
        advantages: any shape.
        clip_max: the advantage at which q reaches 1.
        mode: replaces A by A (all), max(A, 0), min(A, 0), 1 where A > 0 else 0 (`one_only`), or sign(A) (binary).
    """
    used_advantages = {
        "all": advantages,
        "positive_only": advantages.clamp(min=0.0),
        "negative_only": advantages.clamp(max=0.0),
        "one_only": (advantages > 0).to(advantages.dtype),
        "binary": advantages.sign(),
    }[mode]
    return (0.5 * used_advantages / clip_max + 0.5).clamp(0.0, 1.0)


def prediction_loss(noised: Noised, v: Float[Tensor, "B n *latent"], adaptive: bool) -> Float[Tensor, "B n"]:
    """[B, n] float64: mean (x0_hat - x0)^2 / w,  x0_hat = x_t - t v,  w = mean |x0_hat - x0| (detached), or 1.

    The error x0_hat - x0 is t (u - v), since x_t = x0 + t u.

    Args:
        v: [B, n, *latent] a velocity at the noised samples.
    """
    error = noised.t_like(v).double() * (noised.target.double() - v.double())
    squares = element_means(error.square())
    if not adaptive:
        return squares
    return squares / element_means(error.detach().abs()).clamp(min=MIN_ADAPTIVE_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class DiffusionNFT(ForwardProcessLoss):
    """L = mean over rows and times of  (adv_clip_max / beta) (q l(v+) + (1 - q) l(v-)) + velocity_coef |v - v_ref|^2.

        v+ = beta v + (1 - beta) v_old,   v- = (1 + beta) v_old - beta v,   q = (A / adv_clip_max + 1) / 2

    l is the squared error of the clean sample that a velocity predicts, A the advantage, v_old the velocity of the
    policy that sampled: a snapshot that follows the trained policy once per step (backend.ema_lora_cfg). DiffusionNFT
    (arXiv:2509.16117, section 3), with the adaptive weighting and the factor adv_clip_max of the released code. It uses
    no importance ratio.
    """

    requires_ema_rollout: ClassVar[bool] = True

    beta: float = 1.0
    """Inverse strength of the step from the old policy towards good samples. A smaller beta moves further."""
    adv_clip_max: float = 5.0
    """The advantage at which a sample is certainly good (q = 1), or with the other sign certainly bad (q = 0)."""
    adv_mode: AdvantageMode = "all"
    """The used part of the advantage: all, one sign only, 1 if positive (one_only), or its sign (binary)."""
    use_adaptive_weight: bool = True
    """Divide every squared error by its own mean absolute error, so that all times have similar weights."""
    velocity_coef: float = 1e-4
    """Factor of the mean squared distance to the velocity of the policy at initialisation; 0 = none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(beta=self.beta, adv_clip_max=self.adv_clip_max)
        check_coefficients(velocity_coef=self.velocity_coef)

    def velocity_penalties(self) -> Mapping[str, float]:
        return {REFERENCE: self.velocity_coef}

    def anchors(self) -> Mapping[str, Anchor]:
        return {"old_velocity": Anchor("old", "velocity"), **super().anchors()}

    def loss(
        self, stage: DiffusionStage, rows: RolloutTrack[LatentSegment], part: Part, now: TrainingProgress = START
    ) -> LossResult:
        noised, weights = self.noised(rows, part), self.weights(rows, part)
        v, v_old = self.velocity(stage, rows, noised), self.snapshot_anchor(rows, "old_velocity", part)
        q = optimality(self.element_advantages(rows, part).double(), self.adv_clip_max, self.adv_mode)
        positive = prediction_loss(noised, self.beta * v + (1.0 - self.beta) * v_old, self.use_adaptive_weight)
        negative = prediction_loss(noised, (1.0 + self.beta) * v_old - self.beta * v, self.use_adaptive_weight)
        policy = self.adv_clip_max / self.beta * (q * positive + (1.0 - q) * negative)
        penalty, metrics = self.velocity_penalty(rows, part, v)
        metrics |= {
            "train/policy_loss": mean_metric(policy, weights),
            "train/positive_loss": mean_metric(positive, weights),
            "train/negative_loss": mean_metric(negative, weights),
            "train/optimality": mean_metric(q, weights),
            velocity_metric("old"): mean_metric(mean_square(v.detach(), v_old), weights),
        }
        outputs: PolicyOutputs = {"velocity": v.detach()}
        return LossResult(weighted_sum(policy + penalty, weights), metrics, outputs)
