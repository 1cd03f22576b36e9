"""Base class of losses on the clean sample: fresh noise is added, and the velocity of the network is compared there.

    x_t = (1 - t) x0 + t eps,   u = eps - x0 (the target),   e(v) = mean over latent elements of (v - u)^2

These losses need no trajectory and no log-prob of the sampler, so any solver may draw the samples. Times t and noise
eps are functions of (seed, step, sample id), so all compared policies see the same ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import LOSS_RMS, START, LatentRows, LossResult, Part, PolicyOutputs, StageAlgorithm
from unirl.algorithms.shared.checks import check_coefficients, check_key
from unirl.algorithms.shared.contract import elements_of
from unirl.algorithms.shared.kl import element_means
from unirl.algorithms.shared.surrogate import mean_metric, weighted_sum
from unirl.algorithms.shared.training_times import ScheduleTimes, TrainingTimes
from unirl.config.errors import IncompatibleError
from unirl.models.chunks import select_conditions
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.noise import NoiseSource
from unirl.types.device import to_device
from unirl.types.protocols import REFERENCE, Anchor, Needs, TrainingProgress
from unirl.types.results import Metric, Metrics
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Noised:
    """Samples with noise at the training times of one part; n = len(part)."""

    x0: Tensor  # [B, 1, *latent] fp32
    t: Tensor  # [B, n] fp32
    eps: Tensor  # [B, n, *latent] fp32

    @property
    def x(self) -> Float[Tensor, "B n *latent"]:
        """[B, n, *latent] the noised samples x_t."""
        t = self.t_like(self.eps)
        return (1.0 - t) * self.x0 + t * self.eps

    @property
    def target(self) -> Float[Tensor, "B n *latent"]:
        """[B, n, *latent] u, the velocity of the straight path from the sample to its noise."""
        return self.eps - self.x0

    def t_like(self, values: Float[Tensor, "B n *latent"]) -> Float[Tensor, "..."]:
        """The times, reshaped to broadcast over `values` [B, n, *latent]."""
        return self.t.reshape(*self.t.shape, *[1] * (values.dim() - 2))


def mean_square(v: Float[Tensor, "B n *latent"], other: Float[Tensor, "B n *latent"]) -> Float[Tensor, "B n"]:
    """[B, n] float64 mean over latent elements of (v - other)^2, from [B, n, *latent]."""
    return element_means((v.double() - other.double()).square())


@dataclass(frozen=True, kw_only=True)
class ForwardProcessLoss(StageAlgorithm[DiffusionStage, LatentSegment]):
    """Base class of losses on (x0, t, eps); subclasses write `loss`. An entry of a part is the index of a time."""

    times: TrainingTimes = field(
        default=ScheduleTimes(), metadata={"target": "unirl.algorithms.shared.training_times.ScheduleTimes"}
    )
    """The noise levels at which samples are trained."""
    times_per_forward: int = 1
    """Training times in one forward. More are faster for small micro-batches and need the memory of more rows."""
    train_guided: bool = False
    """Train the velocity with the rollout's guidance. Otherwise train it without, and refuse a guided rollout."""

    sampled_by: ClassVar[type] = DiffusionSamplingParams

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key(self.times_per_forward >= 1, "algorithm.times_per_forward", "be >= 1", self.times_per_forward)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, density=False)

    def check_sampling(self, sampling: DiffusionSamplingParams) -> None:
        """Raises InvalidValueError for a schedule without enough levels, IncompatibleError for untrained guidance."""
        self.times.count(sampling.num_inference_steps)
        if sampling.is_guided and not self.train_guided:
            key = "guidance_scale" if sampling.guidance_scale != 1 else "guidance_scale_2"
            raise IncompatibleError(
                f"sampling.{key}={vars(sampling)[key]:g} is CFG at rollout and not at training: "
                f"{type(self).__name__} trains the velocity without guidance towards samples that were drawn with it. "
                f"Set sampling.{key}=1 (evaluation.guidance_scale may differ), or algorithm.train_guided=true"
            )

    def parts(self, segment: LatentSegment) -> list[Part]:
        numbers, size = tuple(range(self.times.count(segment.num_steps))), self.times_per_forward
        return [numbers[i : i + size] for i in range(0, len(numbers), size)]

    def noise_ids(self, rows: LatentRows) -> Sequence[str]:
        """The id that keys the times and the noise of each row."""
        return rows.sample_ids

    def noised(self, rows: LatentRows, part: Part) -> Noised:
        """The rows at the times of `part`. A row of weight 0 is replaced by zeros."""
        segment = rows.segment
        x0 = mask_rows(rows, segment.final.float())
        noise, ids = NoiseSource(segment.seed, "r", segment.step), self.noise_ids(rows)
        t = self.times.draw(segment.sigmas, noise, ids)[:, list(part)]
        eps = torch.stack([noise.normal(ids, f"t{j}", x0.shape[1:]) for j in part], dim=1)
        return Noised(x0[:, None], to_device(t, x0.device), to_device(eps, x0.device))

    def velocity(self, stage: DiffusionStage, rows: LatentRows, noised: Noised) -> Float[Tensor, "B n *latent"]:
        """[B, n, *latent] fp32 velocity of the stage at the noised samples, in one forward."""
        batch, count = noised.t.shape
        conditions = select_conditions(rows.conditions, [row for row in range(batch) for _ in range(count)])
        segment = rows.segment
        guidance = segment.guidance if self.train_guided else segment.guidance.off()
        v = stage.velocity(noised.x.flatten(0, 1), noised.t.flatten(), conditions, guidance)
        return v.reshape(batch, count, *v.shape[1:])

    def outputs(self, noised: Noised, v: Float[Tensor, "B n *latent"]) -> PolicyOutputs:
        """The detached outputs of a forward that anchors read."""
        return {"velocity": v.detach()}

    def measure(self, stage: DiffusionStage, rows: LatentRows, part: Part) -> PolicyOutputs:
        noised = self.noised(rows, part)
        return self.outputs(noised, self.velocity(stage, rows, noised))

    def element_advantages(self, rows: LatentRows, part: Part) -> Float[Tensor, "B n"]:
        return mask_rows(rows, super().element_advantages(rows, part))

    def weights(self, rows: LatentRows, part: Part) -> Float[Tensor, "B n"]:
        """[B, n] the row's weight for each of its elements."""
        return rows.weight[:, None].expand(-1, len(part))


@dataclass(frozen=True, kw_only=True)
class PenalizedLoss(ForwardProcessLoss):
    """L = mean over rows and times of  P + velocity_coef |v - v_ref|^2.  P is the `policy_loss` of a subclass."""

    velocity_coef: float = 1e-4
    """Factor of the mean squared distance to the velocity of the policy at initialisation; 0 = none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefficients(velocity_coef=self.velocity_coef)

    @abstractmethod
    def policy_loss(
        self, noised: Noised, v: Float[Tensor, "B n *latent"], rows: LatentRows, part: Part
    ) -> tuple[Float[Tensor, "B n"], Metrics]:
        """Returns (P, metrics): P [B, n] float64 per sample and training time with its gradient, a dict of `Metric`.

        Args:
            v: the velocity of the trained weights at the noised samples.
        """

    def velocity_penalties(self) -> Mapping[str, float]:
        """Coefficient of the squared distance to the velocity of each snapshot, by snapshot; 0 = no penalty."""
        return {REFERENCE: self.velocity_coef}

    def anchors(self) -> Mapping[str, Anchor]:
        return {
            f"{name}_velocity": Anchor(name, "velocity") for name, coef in self.velocity_penalties().items() if coef > 0
        }

    def loss(self, stage: DiffusionStage, rows: LatentRows, part: Part, now: TrainingProgress = START) -> LossResult:
        """One forward at the noised samples of `part`, then the sum of policy loss and velocity penalties."""
        noised, weights = self.noised(rows, part), self.weights(rows, part)
        v = self.velocity(stage, rows, noised)
        returned = self.policy_loss(noised, v, rows, part)
        policy, policy_metrics = elements_of(self, "policy_loss", returned, weights.shape, v.requires_grad)
        penalty, metrics = self.velocity_penalty(rows, part, v)
        metrics |= policy_metrics | {"train/policy_loss": mean_metric(policy, weights)}
        losses = policy + penalty
        metrics[LOSS_RMS] = Metric.rms(losses.detach(), weights)
        return LossResult(weighted_sum(losses, weights), metrics, self.outputs(noised, v))

    def velocity_penalty(
        self, rows: LatentRows, part: Part, v: Float[Tensor, "B n *latent"]
    ) -> tuple[Float[Tensor, "B n"], Metrics]:
        """[B, n] float64 sum over snapshots of coefficient times mean (v - v_snapshot)^2, and its metrics."""
        weights = self.weights(rows, part)
        total, metrics = torch.zeros_like(weights, dtype=torch.float64), Metrics()
        for name, coef in self.velocity_penalties().items():
            if coef > 0:
                gap = mean_square(v, self.filled_anchor(rows, f"{name}_velocity", part))
                total = total + coef * gap
                metrics[velocity_metric(name)] = mean_metric(gap, weights)
        if metrics:
            metrics["train/velocity_loss"] = mean_metric(total, weights)
        return total, metrics


def velocity_metric(snapshot: str) -> str:
    """The metric name of the distance to a snapshot's velocity."""
    return "train/velocity_mse" if snapshot == REFERENCE else f"train/velocity_mse_{snapshot}"


def mask_rows(rows: LatentRows, values: Float[Tensor, "B *rest"]) -> Float[Tensor, "B *rest"]:
    """`values` [B, ...] with zeros in rows of weight 0, so that their contents cannot reach a gradient."""
    return torch.where((rows.weight > 0).reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
