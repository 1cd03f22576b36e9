"""AWM: a policy gradient whose log-prob is replaced by the negative pre-training loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from unirl.algorithms.base import LatentRows, Part, PolicyOutputs
from unirl.algorithms.shared.checks import check_coefficients, check_fractions, check_positive
from unirl.algorithms.shared.forward_process import Noised, PenalizedLoss, mean_square
from unirl.algorithms.shared.kl import MAX_LOG_RATIO
from unirl.algorithms.shared.surrogate import clip_fractions, clipped_surrogate, spread_metrics
from unirl.types.protocols import Anchor
from unirl.types.results import Metrics

if TYPE_CHECKING:
    from jaxtyping import Float

Form = Literal["uniform", "linear", "quadratic", "huber", "power_huber"]

HUBER_DELTA = 1e-10
"""Offset inside the root, whose slope at error 0 would be infinite."""


def huber(error: Float[Tensor, "*elements"], power: float) -> Float[Tensor, "*elements"]:
    """((e + d)^p - d^p) / p with d = HUBER_DELTA. It is e for p = 1; a smaller p reduces the weight of large errors."""
    return ((error + HUBER_DELTA).pow(power) - math.pow(HUBER_DELTA, power)) / power


FORMS: Mapping[Form, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda error, t, power: error,
    "linear": lambda error, t, power: t * error,
    "quadratic": lambda error, t, power: t.square() * error,
    "huber": lambda error, t, power: 0.5 * t * huber(error, 0.5),
    "power_huber": lambda error, t, power: t * huber(error, power),
}


def log_prob_surrogate(
    form: Form, error: Float[Tensor, "*elements"], t: Float[Tensor, "*elements"], power: float = 0.25
) -> Float[Tensor, "*elements"]:
    """-g(e, t), the surrogate of the log-prob of a sample; any shape.

    uniform e, linear t e, quadratic t^2 e, huber t (sqrt(e + d) - sqrt(d)), power_huber t ((e + d)^p - d^p) / p

    e >= 0 is the mean squared error of the velocity, t the training times, p the power of power_huber.
    """
    return -FORMS[form](error, t.to(error.dtype), power)


@dataclass(frozen=True, kw_only=True)
class DiffusionAWM(PenalizedLoss):
    """L = mean over rows and times of  -min(r A, clip(r) A) + velocity_coef |v - v_ref|^2 + ema_coef |v - v_ema|^2.

        r = exp(l_theta - l_old),   l = -g(e(v), t),   e(v) = mean over latent elements of (v - u)^2

    Advantage weighted matching (arXiv:2509.25050). u = eps - x0 is the target velocity, A the advantage, r an
    importance ratio of surrogate log-probs. At r = 1 the gradient of the uniform form is that of A e(v), the
    pre-training loss weighted by the advantage. l_theta and l_old use the same time and noise.
    """

    surrogate: Form = "power_huber"
    """g: e, t e, t^2 e, or a form that grows slower than e and so bounds the gradient of samples with A < 0."""
    huber_power: float = 0.25
    """p of power_huber."""
    clip_range: float | None = None
    """The ratio is clipped to 1 +- clip_range; null = no clipping, as in the published runs."""
    ema_coef: float = 0.0
    """Factor of the mean squared distance to the velocity of the snapshot `ema_snapshot`; 0 = none."""
    ema_snapshot: Literal["old", "ema"] = "old"
    """old: updated once per step by backend.ema_lora_cfg (published: ceiling 0.3). ema: per update, backend.ema_cfg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(huber_power=self.huber_power)
        check_coefficients(ema_coef=self.ema_coef)
        check_fractions("write null for no clipping", clip_range=self.clip_range)

    def velocity_penalties(self) -> Mapping[str, float]:
        return {**super().velocity_penalties(), self.ema_snapshot: self.ema_coef}

    def anchors(self) -> Mapping[str, Anchor]:
        return {"old_logp": Anchor("live", "logp"), **super().anchors()}

    def outputs(self, noised: Noised, v: Float[Tensor, "B n *latent"]) -> PolicyOutputs:
        return {"velocity": v.detach(), "logp": self._surrogate(noised, v).detach()}

    def policy_loss(
        self, noised: Noised, v: Float[Tensor, "B n *latent"], rows: LatentRows, part: Part
    ) -> tuple[Float[Tensor, "B n"], Metrics]:
        weights, advantages = self.weights(rows, part), self.element_advantages(rows, part).double()
        logp, old = self._surrogate(noised, v), self.anchor(rows, "old_logp", part)
        log_ratio = logp - (logp.detach() if old is None else old)
        means = {"train/matching_error": mean_square(v.detach(), noised.target)}
        if self.clip_range is None:
            losses = -advantages * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        else:
            clip, ratio = self.clip_range, log_ratio.detach().exp()
            means |= clip_fractions(ratio > 1.0 + clip, ratio < 1.0 - clip)
            losses = clipped_surrogate(log_ratio, advantages, clip, clip)
        return losses, spread_metrics(log_ratio.detach(), weights, means)

    def _surrogate(self, noised: Noised, v: Tensor) -> Tensor:
        """[B, n] float64 surrogate log-prob l."""
        return log_prob_surrogate(self.surrogate, mean_square(v, noised.target), noised.t, self.huber_power)
