"""Base class of losses on replayed denoising steps: anchors, step weights, and penalties towards the reference.

`DenoisingLoss.loss` replays the stochastic steps of a part, calls `policy_loss` of the subclass, multiplies it by the
step weights, and adds the penalties. The step weights are pure functions of the kernel and the schedule. The
log-probs of different steps have gradients of very different size with respect to the velocity: `velocity_slope` of the
first and of the last trained step of Flow-SDE with ten steps differ by a factor of 17. Each rule compensates for it in
its own way. Rules that normalise do so over all steps that have a density, so the weight of a step does not depend on
the steps that are drawn with it.

Shapes: B rows, and S = len(part), the steps that one forward replays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import LOSS_RMS, START, LatentRows, LossResult, Part, PolicyGradient, PolicyOutputs
from unirl.algorithms.shared.checks import check_coefficients, check_key
from unirl.algorithms.shared.contract import check_elements, check_quantities, elements_of
from unirl.algorithms.shared.kl import KLForm, element_means, gaussian_kl, k1
from unirl.algorithms.shared.mismatch import Correction, ElementCorrection, check_source, mismatch_metrics
from unirl.algorithms.shared.surrogate import ClipSchedule, clip_scale, mean_metric, weighted_sum
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.models.denoising.stage import DiffusionStage, Replay
from unirl.sde.gaussian import HALF_LOG_TWO_PI
from unirl.types.protocols import REFERENCE, Anchor, Kernel, Needs, Quantity, TrainingProgress
from unirl.types.results import Metric, Metrics
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float

StepWeights = Literal["uniform", "tempflow", "flash", "inverse_dt"]

WITH_MEAN_ONE: tuple[StepWeights, ...] = ("flash", "inverse_dt")
"""The rules whose weights are divided by their mean."""

TEMPFLOW_SCALE = 2.25

REPLAYED: tuple[Quantity, ...] = ("logp", "mean", "velocity")
"""The outputs of a replayed step."""


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


def unscaled_weight(rule: StepWeights, kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """The weight of a step before weights are divided by their mean.

    uniform: 1. tempflow: 2.25 std, because steps with more noise explore more (TempFlow-GRPO, arXiv:2508.04324). flash:
    1 / |kappa|, which makes the gradients of all steps in the velocity equal in size (Flash-GRPO's rectification).
    inverse_dt: 1 / (sigma - sigma_next) (GRPO-Guard, arXiv:2510.22319).
    """
    match rule:
        case "uniform":
            return 1.0
        case "tempflow":
            x = torch.zeros(1, 1, dtype=torch.float64)
            return TEMPFLOW_SCALE * float(kernel.transition(x, x, sigma, sigma_next).std)
        case "flash":
            return 1.0 / abs(velocity_slope(kernel, sigma, sigma_next))
        case "inverse_dt":
            return 1.0 / (sigma - sigma_next)


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
    weights = [unscaled_weight(rule, kernel, sigmas[i], sigmas[i + 1]) for i in dense]
    mean = sum(weights) / len(weights) if rule in WITH_MEAN_ONE else 1.0
    return {i: weight / mean for i, weight in zip(dense, weights, strict=True)}


@dataclass(frozen=True, kw_only=True)
class DenoisingLoss(PolicyGradient[DiffusionStage, LatentSegment]):
    """L = mean over rows and stochastic steps of  w_i P_i + beta KL_i + lambda |v_theta - v_ref|^2.

    P is the policy loss of a subclass (its `policy_loss`), w the step weights. KL_i and the velocity term compare with
    the policy at initialisation. A term with coefficient 0 is neither computed nor anchored.
    """

    steps_per_forward: int = 1
    """Denoising steps per forward. More are faster for small micro-batches and need the memory of more rows."""
    step_weights: StepWeights = "uniform"
    """w: uniform 1, tempflow 2.25 std, flash 1 / |d logp / dv|, inverse_dt 1 / dt; the last two with mean 1."""
    kl_form: KLForm = "transition"
    """transition: the exact KL of the step; flow_grpo: that times |dt|, as in Flow-GRPO's released code."""
    kl_schedule: ClipSchedule = "constant"
    """beta over the run: constant, linear to one half, or cosine to zero."""
    velocity_coef: float = 0.0
    """lambda, the factor of the mean squared difference to the reference's velocity (UniGRPO); 0 = none."""
    mismatch: Correction | None = None
    """Weights pi_old / pi_engine for an engine with other numerics or weights of earlier steps, with log-probs that are
    means over latent elements, as in the importance ratio. Needs old_logp_source=replay; null = none."""

    sampled_by: ClassVar[type] = DiffusionSamplingParams

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key(self.steps_per_forward >= 1, "algorithm.steps_per_forward", "be >= 1", self.steps_per_forward)
        check_coefficients(velocity_coef=self.velocity_coef)
        check_source(self.mismatch, self.old_logp_source)
        if not isinstance(self.mismatch, ElementCorrection | None):
            raise InvalidValueError(
                f"algorithm.mismatch: {type(self.mismatch).__name__} weighs whole responses, and this loss trains "
                "denoising steps. Use unirl.algorithms.shared.mismatch.TokenTIS or MaskedIS"
            )
        if self.kl_in == "reward" and self.kl_form != "transition":
            raise InvalidValueError(
                f"algorithm.kl_form={self.kl_form} is a form of the loss term, and algorithm.kl_in=reward estimates "
                "the transition's KL from log-probs: leave kl_form out, or set kl_in=loss"
            )

    @abstractmethod
    def old_quantities(self) -> tuple[Quantity, ...]:
        """The names of the outputs of the policy that sampled that `policy_loss` reads, such as ("logp",)."""

    @abstractmethod
    def policy_loss(
        self, new: Replay, rows: LatentRows, part: Part, advantages: Float[Tensor, "B S"], now: TrainingProgress
    ) -> tuple[Float[Tensor, "B S"], Metrics]:
        """Returns (P, metrics): P [B, S] per sample and denoising step with its gradient, a dict of `Metric` by name.

        Args:
            new: the replayed steps, under the weights that are trained.
            advantages: [B, S]
        """

    @property
    def reads_density(self) -> bool:
        """True if log-probs must be those of the normal distribution, including its normaliser."""
        return self._kl_in_reward

    @property
    def needs(self) -> Needs:
        reads_engine = self.old_logp_source == "rollout" or self.mismatch is not None
        return replace(super().needs, behaviour_logp=reads_engine)

    def check_sampling(self, sampling: DiffusionSamplingParams) -> None:
        self._check_density(sampling.kernel)

    def anchors(self) -> Mapping[str, Anchor]:
        quantities = self.old_quantities()
        check_quantities(self, "old_quantities", quantities, REPLAYED)
        old: set[Quantity] = {*quantities}
        reference: set[Quantity] = set()
        if self.mismatch is not None:
            old.add("logp")
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

    def measure(self, stage: DiffusionStage, rows: LatentRows, part: Part) -> PolicyOutputs:
        return self._outputs(stage.replay(rows.conditions, rows.segment, part))

    def loss(self, stage: DiffusionStage, rows: LatentRows, part: Part, now: TrainingProgress = START) -> LossResult:
        """Replays the steps of `part`, then sums the weighted policy loss and the penalties towards the reference."""
        self._check_density(rows.segment.kernel)
        new = stage.replay(rows.conditions, rows.segment, part)
        weights = rows.weight[:, None].expand_as(new.logp)
        metrics: Metrics = {}
        advantages, penalties = self.element_advantages(rows, part), []
        check_elements(self, "element_advantages", advantages, weights.shape, has_graph=False)
        if self.kl_coef > 0:
            kl, beta = self.reference_kl(new, rows, part), self.kl_at(now)
            metrics |= step_metrics("train/kl", kl, weights, part)
            metrics |= {"train/kl": mean_metric(kl, weights), "train/kl_coef": Metric.mean(beta)}
            if self._kl_in_reward:
                # The policy loss averages log-probs over D elements, so its gradient is 1/D of that of the reward's KL.
                advantages = advantages - beta * new.mean[0, 0].numel() * kl
            else:
                penalties.append(("train/kl_loss", beta * self._in_kl_form(kl, rows.segment, part)))
        if self.velocity_coef > 0:
            reference = self.anchor_or_self(rows, "ref_velocity", part, new.velocity)
            error = element_means((new.velocity - reference).square())
            metrics["train/velocity_mse"] = mean_metric(error, weights)
            penalties.append(("train/velocity_loss", self.velocity_coef * error))
        returned = self.policy_loss(new, rows, part, advantages, now)
        policy, policy_metrics = elements_of(self, "policy_loss", returned, weights.shape, new.logp.requires_grad)
        policy, mismatch = self._corrected(policy, new, rows, part)
        policy = self._with_step_weights(policy, rows.segment, part)
        metrics |= policy_metrics | mismatch | {"train/policy_loss": mean_metric(policy, weights)}
        metrics |= {name: mean_metric(term, weights) for name, term in penalties}
        losses = sum((term for _, term in penalties), policy)
        metrics[LOSS_RMS] = Metric.rms(losses.detach(), weights)
        return LossResult(weighted_sum(losses, weights), metrics, self._outputs(new), advantages.detach())

    def _corrected(self, losses: Tensor, new: Replay, rows: LatentRows, part: Part) -> tuple[Tensor, Metrics]:
        """[B, S] the policy losses times the mismatch weights, if the recipe has a correction."""
        if self.mismatch is None:
            return losses, {}
        assert isinstance(self.mismatch, ElementCorrection)
        weights = rows.weight[:, None].expand_as(new.logp)
        recorded = rows.segment.columns(rows.segment.logp, part)
        gap = torch.where(weights > 0, self.old_logp(new, rows, part) - recorded, 0.0)
        corrected = self.mismatch.of_elements(gap)
        return corrected.weights * losses, mismatch_metrics(gap, corrected, weights)

    def kl_at(self, now: TrainingProgress) -> float:
        """beta at this point of the run."""
        return self.kl_coef * clip_scale(self.kl_schedule, now.progress) * now.kl_scale

    def reference_kl(self, new: Replay, rows: LatentRows, part: Part) -> Float[Tensor, "B S"]:
        """KL to the reference [B, S] in nats, mean over latent elements.

        With kl_in=loss the exact KL of pi_theta with gradient; with kl_in=reward a detached single-sample estimate for
        the policy that sampled, whose mean is the KL.
        """
        if self._kl_in_reward:
            return k1(self.old_logp(new, rows, part) - self.anchor_or_self(rows, "ref_logp", part, new.logp))
        return gaussian_kl(new.mean, self.anchor_or_self(rows, "ref_mean", part, new.mean), new.std)

    def old_logp(self, new: Replay, rows: LatentRows, part: Part) -> Float[Tensor, "B S"]:
        """Log-prob [B, S] under the policy that sampled, pi_old of the importance ratio."""
        if self.old_logp_source == "replay":
            return self.anchor_or_self(rows, "old_logp", part, new.logp)
        recorded = rows.segment.columns(rows.segment.logp, part)
        return torch.where(rows.weight[:, None] > 0, recorded, new.logp.detach())

    def anchor_or_self(
        self, rows: LatentRows, name: str, part: Part, own: Float[Tensor, "B S *rest"]
    ) -> Float[Tensor, "B S *rest"]:
        """The anchor `name`; `own` detached where the anchor is absent or the row has weight 0."""
        column = self.anchor(rows, name, part)
        if column is None:
            return own.detach()
        return torch.where(rows.weight.view(-1, *[1] * (own.dim() - 1)) > 0, column, own.detach())

    def parity(self, rows: LatentRows, part: Part, outputs: PolicyOutputs) -> Metrics:
        recorded = rows.segment.columns(rows.segment.logp, part)
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


def step_metrics(name: str, values: Float[Tensor, "B S"], weights: Float[Tensor, "B S"], part: Part) -> Metrics:
    """The weighted mean of each denoising step of `part`."""
    return {f"{name}_step_{step}": mean_metric(values[:, j], weights[:, j]) for j, step in enumerate(part)}
