"""DiffusionNFT: regression in the forward process raises or lowers the likelihood of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from unirl.algorithms.base import LatentRows, Part
from unirl.algorithms.shared.checks import check_positive
from unirl.algorithms.shared.forward_process import Noised, PenalizedLoss, mean_square, velocity_metric
from unirl.algorithms.shared.kl import element_means
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.types.protocols import Anchor
from unirl.types.results import Metrics

if TYPE_CHECKING:
    from jaxtyping import Float

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]

MIN_ADAPTIVE_WEIGHT = 1e-5
"""Lower bound of the adaptive weight, which is 0 for an exact prediction."""


def optimality(
    advantages: Float[Tensor, "*elements"], clip_max: float, mode: AdvantageMode = "all"
) -> Float[Tensor, "*elements"]:
    """q = clip((A / clip_max + 1) / 2, 0, 1), the probability that a sample is good; 1/2 is neutral.

    `mode` replaces A by A (all), max(A, 0), min(A, 0), 1 where A > 0 else 0 (`one_only`), or sign(A) (binary).
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
    """
    error = noised.t_like(v).double() * (noised.target.double() - v.double())
    squares = element_means(error.square())
    if not adaptive:
        return squares
    return squares / element_means(error.detach().abs()).clamp(min=MIN_ADAPTIVE_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class DiffusionNFT(PenalizedLoss):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(beta=self.beta, adv_clip_max=self.adv_clip_max)

    def anchors(self) -> Mapping[str, Anchor]:
        return {"old_velocity": Anchor("old", "velocity"), **super().anchors()}

    def policy_loss(
        self, noised: Noised, v: Float[Tensor, "B n *latent"], rows: LatentRows, part: Part
    ) -> tuple[Float[Tensor, "B n"], Metrics]:
        weights, v_old = self.weights(rows, part), self.filled_anchor(rows, "old_velocity", part)
        q = optimality(self.element_advantages(rows, part).double(), self.adv_clip_max, self.adv_mode)
        positive = prediction_loss(noised, self.beta * v + (1.0 - self.beta) * v_old, self.use_adaptive_weight)
        negative = prediction_loss(noised, (1.0 + self.beta) * v_old - self.beta * v, self.use_adaptive_weight)
        return self.adv_clip_max / self.beta * (q * positive + (1.0 - q) * negative), {
            "train/positive_loss": mean_metric(positive, weights),
            "train/negative_loss": mean_metric(negative, weights),
            "train/optimality": mean_metric(q, weights),
            velocity_metric("old"): mean_metric(mean_square(v.detach(), v_old), weights),
        }
