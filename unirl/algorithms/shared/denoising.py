"""Base class of losses on replayed denoising steps: anchors, step weights, and penalties towards the reference.

`DenoisingLoss.loss` replays the stochastic steps of a part, calls `policy_loss` of the subclass, multiplies it by the
step weights, and adds the penalties. The step weights are pure functions of the kernel and the schedule. The
log-probs of different steps have gradients of very different size with respect to the velocity: `velocity_slope` of the
first and of the last trained step of Flow-SDE with ten steps differ by a factor of 17. Each rule compensates for it in
its own way. Rules that normalise do so over all steps that have a density, so the weight of a step does not depend on
the steps that are drawn with it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import START, LossResult, Part, PolicyOutputs, StageAlgorithm
from unirl.algorithms.shared.kl import AdaptiveKL, KLController, KLForm, element_means, gaussian_kl, k1
from unirl.algorithms.shared.surrogate import ClipSchedule, clip_scale, mean_metric, weighted_sum
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.models.denoising.stage import DiffusionStage, Replay
from unirl.sde.gaussian import HALF_LOG_TWO_PI
from unirl.types.protocols import REFERENCE, Anchor, Kernel, Needs, Quantity, TrainingProgress
from unirl.types.results import Metric, Metrics
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float

StepWeights = Literal["uniform", "tempflow", "flash", "inverse_dt"]

SigmaPair = tuple[float, float]
"""(sigma, sigma_next) of a step."""

TEMPFLOW_SCALE = 2.25


def velocity_slope(kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """kappa = d log p / dv for a latent of one element, at one standard deviation above the mean (z = 1).

    At z, and with the log-prob averaged over D elements, the slope of each element is kappa z / D.
    """
    with torch.enable_grad():
        v = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        step = kernel.transition(torch.zeros_like(v), v, sigma, sigma_next)
        log_prob = step.log_prob(step.sample(torch.ones_like(v)))
        (slope,) = torch.autograd.grad(log_prob.sum(), v)
    return float(slope)


def transition_std(kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """The standard deviation of the noise of a step."""
    x = torch.zeros(1, 1, dtype=torch.float64)
    return float(kernel.transition(x, x, sigma, sigma_next).std)


def uniform(kernel: Kernel, spans: Sequence[SigmaPair]) -> list[float]:
    """1 for every step."""
    return [1.0] * len(spans)


def tempflow(kernel: Kernel, spans: Sequence[SigmaPair]) -> list[float]:
    """2.25 std: steps with more noise explore more and weigh more. TempFlow-GRPO, arXiv:2508.04324. Not normalised."""
    return [TEMPFLOW_SCALE * transition_std(kernel, *span) for span in spans]


def flash(kernel: Kernel, spans: Sequence[SigmaPair]) -> list[float]:
    """1 / |kappa|, mean 1: all steps have gradients of equal size in the velocity. Flash-GRPO's rectification."""
    return with_mean_one([1.0 / abs(velocity_slope(kernel, *span)) for span in spans])


def inverse_dt(kernel: Kernel, spans: Sequence[SigmaPair]) -> list[float]:
    """1 / (sigma - sigma_next), mean 1. GRPO-Guard, arXiv:2510.22319."""
    return with_mean_one([1.0 / (start - end) for start, end in spans])


def with_mean_one(values: Sequence[float]) -> list[float]:
    """The values divided by their mean."""
    mean = sum(values) / len(values)
    return [value / mean for value in values]


RULES: Mapping[StepWeights, Callable[[Kernel, Sequence[SigmaPair]], list[float]]] = {
    "uniform": uniform,
    "tempflow": tempflow,
    "flash": flash,
    "inverse_dt": inverse_dt,
}


def step_weights(
    rule: StepWeights, kernel: Kernel, sigmas: Float[Tensor, "levels"], steps: Sequence[int]
) -> list[float]:
    """The weight of each of `steps` in the schedule `sigmas` [T + 1]. All of them must have a density."""
    weights = _schedule_weights(rule, kernel, tuple(sigmas.tolist()))  # type: ignore[arg-type]  # equal by value
    return [weights[step] for step in steps]


@cache
def _schedule_weights(rule: StepWeights, kernel: Kernel, sigmas: tuple[float, ...]) -> dict[int, float]:
    num_steps = len(sigmas) - 1
    dense = [i for i in range(num_steps) if kernel.has_density(i, num_steps)]
    spans = [(sigmas[i], sigmas[i + 1]) for i in dense]
    return dict(zip(dense, RULES[rule](kernel, spans), strict=True))


@dataclass(frozen=True, kw_only=True)
class DenoisingLoss(StageAlgorithm[DiffusionStage, LatentSegment]):
    """L = mean over rows and stochastic steps of  w_i P_i + beta KL_i + lambda |v_theta - v_ref|^2.

    P is the policy loss of a subclass (its `policy_loss`), w the step weights. KL_i and the velocity term compare with
    the policy at initialisation. A term with coefficient 0 is neither computed nor anchored.
    """

    old_logp_source: Literal["replay", "rollout"] = "replay"
    """pi_old: replayed by the trainer (ratio exactly 1 in the first update), or the engine's recorded log-probs."""
    steps_per_forward: int = 1
    """Denoising steps per forward. More are faster for small micro-batches and need the memory of more rows."""
    step_weights: StepWeights = "uniform"
    """w: uniform 1, tempflow 2.25 std, flash 1 / |d logp / dv|, inverse_dt 1 / dt; the last two with mean 1."""
    kl_coef: float = 0.0
    """beta, the factor of KL(pi_theta || reference) per step, nats averaged over latent elements; 0 = no KL."""
    kl_form: KLForm = "transition"
    """transition: the exact KL of the step; flow_grpo: that times |dt|, as in Flow-GRPO's released code."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: an estimate from the sample is subtracted from the advantage of each step."""
    kl_schedule: ClipSchedule = "constant"
    """beta over the run: constant, linear to one half, or cosine to zero."""
    kl_adaptive: AdaptiveKL | None = None
    """Adapts beta to hold a target divergence; null = beta follows kl_schedule alone."""
    velocity_coef: float = 0.0
    """lambda, the factor of the mean squared difference to the reference's velocity (UniGRPO); 0 = none."""

    sampled_by: ClassVar[type] = DiffusionSamplingParams

    def __post_init__(self) -> None:
        if self.steps_per_forward < 1:
            raise InvalidValueError(f"algorithm.steps_per_forward must be >= 1, got {self.steps_per_forward}")
        for name, value in (("kl_coef", self.kl_coef), ("velocity_coef", self.velocity_coef)):
            if not 0.0 <= value < math.inf:
                raise InvalidValueError(f"algorithm.{name} must be finite and >= 0, got {value}; 0 turns it off")
        if self.kl_adaptive is not None and self.kl_coef == 0.0:
            raise InvalidValueError(
                "algorithm.kl_adaptive adapts algorithm.kl_coef, which is 0: set kl_coef to its initial value, "
                "or leave kl_adaptive out"
            )
        if self.kl_in == "reward" and self.kl_form != "transition":
            raise InvalidValueError(
                f"algorithm.kl_form={self.kl_form} is a form of the loss term, and algorithm.kl_in=reward estimates "
                "the transition's KL from log-probs: leave kl_form out, or set kl_in=loss"
            )

    @abstractmethod
    def old_quantities(self) -> tuple[Quantity, ...]:
        """Outputs of the policy that sampled, as read by the policy loss."""

    @abstractmethod
    def policy_loss(
        self,
        new: Replay,
        rows: RolloutTrack[LatentSegment],
        part: Part,
        advantages: Float[Tensor, "B S"],
        now: TrainingProgress,
    ) -> tuple[Float[Tensor, "B S"], Metrics]:
        """[B, S'] P per element, from `advantages` [B, S'], and its metrics; S' = len(part)."""

    @property
    def reads_density(self) -> bool:
        """True if log-probs must be those of the normal distribution, including its normaliser."""
        return self._kl_in_reward

    @property
    def needs(self) -> Needs:
        return replace(super().needs, behaviour_logp=self.old_logp_source == "rollout")

    def check_sampling(self, sampling: DiffusionSamplingParams) -> None:
        self._check_density(sampling.kernel)

    def kl_controller(self) -> KLController | None:
        return None if self.kl_adaptive is None else KLController(self.kl_adaptive)

    def anchors(self) -> Mapping[str, Anchor]:
        old: set[Quantity] = {*self.old_quantities()}
        reference: set[Quantity] = set()
        if self._kl_in_reward:
            old.add("logp")
            reference.add("logp")
        elif self.kl_coef > 0:
            reference.add("mean")
        if self.velocity_coef > 0:
            reference.add("velocity")
        if self.old_logp_source == "rollout":
            old.discard("logp")
        return {f"old_{q}": Anchor("live", q) for q in sorted(old)} | {
            f"ref_{q}": Anchor(REFERENCE, q) for q in sorted(reference)
        }

    def parts(self, segment: LatentSegment) -> list[Part]:
        steps, size = segment.sde_indices, self.steps_per_forward
        return [steps[i : i + size] for i in range(0, len(steps), size)]

    def measure(self, stage: DiffusionStage, rows: RolloutTrack[LatentSegment], part: Part) -> PolicyOutputs:
        return self._outputs(stage.replay(rows.conditions, rows.segment, part))

    def loss(
        self, stage: DiffusionStage, rows: RolloutTrack[LatentSegment], part: Part, now: TrainingProgress = START
    ) -> LossResult:
        """Replays the steps of `part`, then sums the weighted policy loss and the penalties towards the reference."""
        self._check_density(rows.segment.kernel)
        new = stage.replay(rows.conditions, rows.segment, part)
        weights = rows.weight[:, None].expand_as(new.logp)
        metrics: Metrics = {}
        advantages, penalties = self.element_advantages(rows, part), []
        if self.kl_coef > 0:
            kl, beta = self.reference_kl(new, rows, part), self.kl_at(now)
            metrics |= kl_metrics(kl, weights, part) | {"train/kl_coef": Metric.mean(beta)}
            if self._kl_in_reward:
                advantages = advantages - beta * new.mean[0, 0].numel() * kl
            else:
                penalties.append(("train/kl_loss", beta * self._in_kl_form(kl, rows.segment, part)))
        if self.velocity_coef > 0:
            reference = self.anchor_or_self(rows, "ref_velocity", part, new.velocity)
            error = element_means((new.velocity - reference).square())
            metrics["train/velocity_mse"] = mean_metric(error, weights)
            penalties.append(("train/velocity_loss", self.velocity_coef * error))
        policy, policy_metrics = self.policy_loss(new, rows, part, advantages, now)
        policy = self._with_step_weights(policy, rows.segment, part)
        metrics |= policy_metrics | {"train/policy_loss": mean_metric(policy, weights)}
        metrics |= {name: mean_metric(term, weights) for name, term in penalties}
        losses = sum((term for _, term in penalties), policy)
        return LossResult(weighted_sum(losses, weights), metrics, self._outputs(new))

    def kl_at(self, now: TrainingProgress) -> float:
        """beta at this point of the run."""
        return self.kl_coef * clip_scale(self.kl_schedule, now.progress) * now.kl_scale

    def reference_kl(self, new: Replay, rows: RolloutTrack[LatentSegment], part: Part) -> Float[Tensor, "B S"]:
        """[B, S'] KL to the reference, nats, mean over latent elements.

        With kl_in=loss the exact KL of pi_theta with gradient; with kl_in=reward a detached single-sample estimate for
        the policy that sampled, whose mean is the KL.
        """
        if self._kl_in_reward:
            return k1(self.old_logp(new, rows, part) - self.anchor_or_self(rows, "ref_logp", part, new.logp))
        return gaussian_kl(new.mean, self.anchor_or_self(rows, "ref_mean", part, new.mean), new.std)

    def old_logp(self, new: Replay, rows: RolloutTrack[LatentSegment], part: Part) -> Float[Tensor, "B S"]:
        """[B, S'] log-prob under the policy that sampled, pi_old of the importance ratio."""
        if self.old_logp_source == "replay":
            return self.anchor_or_self(rows, "old_logp", part, new.logp)
        recorded = rows.segment.logp[:, rows.segment.columns_of(part)]
        return torch.where(rows.weight[:, None] > 0, recorded, new.logp.detach())

    def anchor_or_self(
        self, rows: RolloutTrack[LatentSegment], name: str, part: Part, own: Float[Tensor, "B S *rest"]
    ) -> Float[Tensor, "B S *rest"]:
        """[B, S', ...] the anchor `name`; `own` detached where the anchor is absent or the row has weight 0."""
        column = self.anchor(rows, name, part)
        if column is None:
            return own.detach()
        return torch.where(rows.weight.view(-1, *[1] * (own.dim() - 1)) > 0, column, own.detach())

    def parity(self, rows: RolloutTrack[LatentSegment], part: Part, outputs: PolicyOutputs) -> Metrics:
        recorded = rows.segment.logp[:, rows.segment.columns_of(part)]
        gap = torch.where(rows.weight[:, None] > 0, (recorded - outputs["logp"]).abs(), 0.0)
        return {"rollout/parity_absdiff_max": Metric.max(gap.max())}

    @property
    def _kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    def _outputs(self, new: Replay) -> PolicyOutputs:
        """The outputs of a forward that anchors and the parity gate read."""
        outputs: PolicyOutputs = {"logp": new.logp, "mean": new.mean, "velocity": new.velocity}
        read = {anchor.quantity for anchor in self.anchors().values()} | {"logp"}
        return {quantity: value.detach() for quantity, value in outputs.items() if quantity in read}

    def _in_kl_form(self, kl: Tensor, segment: LatentSegment, part: Part) -> Tensor:
        if self.kl_form == "transition":
            return kl
        sigmas = segment.sigmas.tolist()
        return kl * torch.tensor([sigmas[i] - sigmas[i + 1] for i in part]).to(kl)

    def _with_step_weights(self, losses: Tensor, segment: LatentSegment, part: Part) -> Tensor:
        if self.step_weights == "uniform":
            return losses
        weights = step_weights(self.step_weights, segment.kernel, segment.sigmas, part)
        return losses * torch.tensor(weights).to(losses)

    def _check_density(self, kernel: Kernel) -> None:
        if self.reads_density and not has_true_density(kernel):  # type: ignore[arg-type]  # equal by value
            raise IncompatibleError(
                f"this {type(self).__name__} needs the density of a step, and the log-prob of {kernel} leaves out its "
                "normaliser. Use sampling.kernel.log_prob_form=gaussian, or algorithm.ratio=plain without "
                "algorithm.kl_in=reward"
            )


@cache
def has_true_density(kernel: Kernel) -> bool:
    """True if a kernel's log-prob is that of the normal distribution: at the mean, -log std - log(2 pi) / 2."""
    x = torch.zeros(1, 1, dtype=torch.float64)
    step = kernel.transition(x, x, 0.5, 0.4)
    return bool((step.log_prob(step.mean) + step.std.log() + HALF_LOG_TWO_PI).abs() < 1e-9)


def kl_metrics(kl: Float[Tensor, "B S"], weights: Float[Tensor, "B S"], part: Part) -> Metrics:
    """The KL to the reference, over all elements and for each denoising step. `kl`, `weights`: [B, S']."""
    return {"train/kl": mean_metric(kl, weights)} | {
        f"train/kl_step_{step}": mean_metric(kl[:, j], weights[:, j]) for j, step in enumerate(part)
    }


def log_ratio_metrics(log_ratio: Float[Tensor, "B S"], weights: Float[Tensor, "B S"], part: Part) -> Metrics:
    """The mean absolute log-ratio of each denoising step. `log_ratio`, `weights`: [B, S']."""
    size = log_ratio.detach().abs()
    return {f"train/log_ratio_step_{step}": mean_metric(size[:, j], weights[:, j]) for j, step in enumerate(part)}
