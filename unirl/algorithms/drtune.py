"""Losses that differentiate the reward itself, through the denoising steps that made the sample.

DRTune, ReFL, DRaFT and AlignProp are `RewardBackprop` with other defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import START, LatentRows, LossResult, Part, PolicyOutputs, StageAlgorithm
from unirl.algorithms.shared.checks import check_coefficients, check_key, check_positive
from unirl.algorithms.shared.kl import element_means
from unirl.algorithms.shared.surrogate import mean_metric, weighted_sum
from unirl.config.errors import InvalidValueError
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.models.denoising.stage import GradientMask
from unirl.sde.noise import key_seed
from unirl.sde.steps import AllSteps, EquallySpacedSteps, LastSteps, RandomTail
from unirl.types.protocols import REFERENCE, Anchor, Needs, StepChoice, TrainingProgress
from unirl.types.results import Metric
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class GradientPath:
    """The sampling steps of one training step, and those with a gradient. Equal for all rows and ranks."""

    num_steps: int
    """Denoising steps to take. The clean prediction of the last one is scored."""
    gradient: GradientMask


@dataclass(frozen=True, kw_only=True)
class RewardBackprop(StageAlgorithm[DifferentiableStage, LatentSegment]):
    """L = mean over samples of -w z, or w relu(c - z) with a ceiling c;  z = (R(decode(x_0(theta))) - b) / s.

    The samples are drawn again with the current weights, from the noise of the rollout, with

        x_{i+1} = a_i x_i + b_i v_i + noise_i,   v_i with gradient at the steps of `gradient_steps`.

    There is no importance ratio.
    """

    gradient_steps: StepChoice = field(default=AllSteps(), metadata={"target": "unirl.sde.steps.AllSteps"})
    """Steps to differentiate, of those that are taken. The last step may be one of them."""
    through_inputs: bool = True
    """Also differentiate the network's input, so that gradients multiply over steps; otherwise they only add up."""
    early_stop: float = 0.0
    """Sampling stops at a random step in this last fraction of the trajectory, and its clean prediction is scored."""
    extra_copies: int = 0
    """n: the sample is noised n times to its last step's level, and the mean over the n + 1 last steps is trained."""
    reward_weight: float = 1.0
    """w, the scale of the gradient before clipping."""
    reward_mean: float = 0.0
    """b, the reward at which z is 0."""
    reward_std: float = 1.0
    """s, the unit of the reward."""
    reward_ceiling: float | None = None
    """c: a sample with z above it has no gradient; null = none."""
    velocity_coef: float = 0.0
    """lambda, the factor of the mean squared difference to the reference's velocity, at noised samples; 0 = none."""

    sampled_by: ClassVar[type] = DiffusionSamplingParams

    def __post_init__(self) -> None:
        super().__post_init__()
        share = "a share of the denoising steps, where 0 takes all of them"
        check_key(0.0 <= self.early_stop < 1.0, "algorithm.early_stop", "lie in [0, 1)", self.early_stop, share)
        check_key(self.extra_copies >= 0, "algorithm.extra_copies", "be >= 0", self.extra_copies, "0 is none")
        check_positive(reward_weight=self.reward_weight, reward_std=self.reward_std)
        for name, value in (("reward_mean", self.reward_mean), ("reward_ceiling", self.reward_ceiling)):
            check_key(value is None or math.isfinite(value), f"algorithm.{name}", "be finite", value)
        check_coefficients(velocity_coef=self.velocity_coef)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, density=False, differentiable_reward=True, advantages=False)

    def anchors(self) -> Mapping[str, Anchor]:
        return {"ref_velocity": Anchor(REFERENCE, "velocity")} if self.velocity_coef > 0 else {}

    def parts(self, segment: LatentSegment) -> list[Part]:
        return [(0,)]  # one part: the whole sample

    def measure(self, stage: DifferentiableStage, rows: LatentRows, part: Part) -> PolicyOutputs:
        return {"velocity": stage.velocity(rows).detach()[:, None]} if self.velocity_coef > 0 else {}

    def loss(
        self, stage: DifferentiableStage, rows: LatentRows, part: Part, now: TrainingProgress = START
    ) -> LossResult:
        """Samples again with gradients, scores the samples, and adds the velocity penalty."""
        path = self.gradient_path(rows.segment)
        rewards = self.rewards(stage, rows, path)
        losses, weights = self.loss_of_rewards(rewards), rows.weight[:, None].expand_as(rewards) / rewards.shape[1]
        total, outputs = weighted_sum(losses, weights), PolicyOutputs()
        metrics = {
            "train/reward_mean": mean_metric(rewards, weights),
            "train/denoising_steps": Metric.mean(float(path.num_steps)),
        }
        if self.reward_ceiling is not None:
            metrics["train/saturated_fraction"] = mean_metric((losses == 0).float(), weights)
        if self.velocity_coef > 0:
            v, reference = stage.velocity(rows)[:, None], self.filled_anchor(rows, "ref_velocity", part)
            error = element_means((v - reference).square())[:, 0]
            total = total + self.velocity_coef * weighted_sum(error, rows.weight)
            metrics["train/velocity_mse"] = mean_metric(error, rows.weight)
            outputs["velocity"] = v.detach()
        return LossResult(total, metrics, outputs)

    def rewards(self, stage: DifferentiableStage, rows: LatentRows, path: GradientPath) -> Float[Tensor, "B copies"]:
        """[B, n + 1] rewards of every row's sample and its n copies, with gradients."""
        x0 = stage.sample(rows, path.num_steps, path.gradient)
        copies = [stage.denoise_again(rows, path.num_steps, x0, copy + 1) for copy in range(self.extra_copies)]
        return torch.stack([stage.objective(sample, rows) for sample in (x0, *copies)], dim=1)

    def loss_of_rewards(self, rewards: Float[Tensor, "*elements"]) -> Float[Tensor, "*elements"]:
        """The loss of each reward; any shape."""
        z = (rewards - self.reward_mean) / self.reward_std
        if self.reward_ceiling is None:
            return -self.reward_weight * z
        return self.reward_weight * (self.reward_ceiling - z).relu()

    def gradient_path(self, segment: LatentSegment) -> GradientPath:
        """The number of sampling steps, and those with a gradient: a function of the seed and the loop's step."""
        shortest = self.min_num_steps(segment.num_steps)
        draw = Random(key_seed(segment.seed, f"r{segment.step}:stop"))
        num_steps = draw.randint(shortest, segment.num_steps)
        # Step choices leave out the last of T steps, which has no density. It can be differentiated, so T is one more.
        steps = self.gradient_steps.choose(segment.step, num_steps + 1, key_seed(segment.seed, "gradient"))
        return GradientPath(num_steps, GradientMask(steps=steps, through_inputs=self.through_inputs))

    def min_num_steps(self, total: int) -> int:
        """The smallest number of denoising steps that `early_stop` allows, of `total`."""
        # The offset corrects rounding: 0.29 x 100 is 28.999999999999996.
        return total + 1 - max(int(self.early_stop * total + 1e-9), 1)

    def check_sampling(self, sampling: DiffusionSamplingParams) -> None:
        """Raises InvalidValueError if the shortest run of `sampling` has too few steps for `gradient_steps`."""
        shortest = self.min_num_steps(sampling.num_inference_steps)
        try:
            self.gradient_steps.choose(0, shortest + 1, 0)
        except ValueError as error:
            raise InvalidValueError(
                f"algorithm.gradient_steps: {error}. A run takes {shortest} of the {sampling.num_inference_steps} "
                f"denoising steps where it stops earliest (algorithm.early_stop={self.early_stop:g})"
            ) from error


@dataclass(frozen=True, kw_only=True)
class DRTune(RewardBackprop):
    """L = mean of -R(x_0), whose gradient is  sum over i of  (sigma_i - sigma_{i+1}) (dv_i / dtheta)^T dR/dx_0.

    Wu et al. 2024, arXiv:2405.00760; i runs over K equally spaced steps. The network's input is detached, so gradients
    do not multiply over steps, and sampling stops at a random step of the last 40 percent. The coefficients above are
    those of Euler's method; other kernels have their own.
    """

    gradient_steps: StepChoice = field(
        default=EquallySpacedSteps(), metadata={"target": "unirl.sde.steps.EquallySpacedSteps"}
    )
    through_inputs: bool = False
    early_stop: float = 0.4


@dataclass(frozen=True, kw_only=True)
class ReFL(RewardBackprop):
    """L = mean w relu(2 - (R(x_m - sigma_m v_m) - b) / s), m uniform over the last quarter of the steps, x_m detached.

    Xu et al. 2023, arXiv:2304.05977, algorithm 1, with the weight and the ceiling of the published code. The ceiling is
    in units of ImageReward, whose scores have mean 0 and standard deviation 1. For another reward, set reward_mean b
    and reward_std s, or no ceiling.
    """

    gradient_steps: StepChoice = field(default=LastSteps(), metadata={"target": "unirl.sde.steps.LastSteps"})
    early_stop: float = 0.25
    reward_weight: float = 1e-3
    reward_ceiling: float | None = 2.0


@dataclass(frozen=True, kw_only=True)
class DRaFT(RewardBackprop):
    """L = mean of -R(x_0), differentiated through the last K steps (DRaFT-K); K = T is the full gradient.

    Clark et al. 2023, arXiv:2309.17400, algorithm 1.
    """

    gradient_steps: StepChoice = field(default=LastSteps(), metadata={"target": "unirl.sde.steps.LastSteps"})


@dataclass(frozen=True, kw_only=True)
class DRaFTLV(DRaFT):
    """DRaFT-1 with less variance: L = -(R(x_0) + sum over j of R(x_0^j)) / (n + 1), with n = 2 copies by default.

    x_0^j is the result of the last step, repeated from (1 - sigma) sg[x_0] + sigma eps_j at its noise level sigma.
    """

    extra_copies: int = 2


@dataclass(frozen=True, kw_only=True)
class AlignProp(RewardBackprop):
    """L = mean of -w R(x_0), differentiated through all steps from a random one on, drawn anew at each step.

    Prabhudesai et al. 2023, arXiv:2310.03739, section 4. Truncation at a random step is cheaper than the full gradient
    and less biased than truncation at a fixed step.
    """

    gradient_steps: StepChoice = field(default=RandomTail(), metadata={"target": "unirl.sde.steps.RandomTail"})
    reward_weight: float = 0.01
