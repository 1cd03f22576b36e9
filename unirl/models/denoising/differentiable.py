"""Samples with a differentiable reward, for losses that follow the gradient of the reward.

    rows --sampled again by the stage, with gradients on some steps--> x_0 --decode, score--> reward [B] --> gradient

Decoder and scorer run forward and backward together, a few rows at a time. Only one gradient per latent is stored for
the backward pass through the denoising steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unirl.models.chunks import balanced_chunk_size, padded_chunks
from unirl.models.denoising.stage import DiffusionStage, GradientMask
from unirl.sde.gaussian import per_row
from unirl.sde.noise import NoiseSource
from unirl.types.progress import progress
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class Objective(Protocol):
    """A differentiable reward."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Rewards [B] of images [B, 3, H, W] in [0, 1], not rounded. Each reward depends on its own row only."""


class DifferentiableStage:
    """A policy with the decoder and the reward that its samples are trained on."""

    def __init__(
        self,
        stage: DiffusionStage,
        decode: Callable[[Tensor], Tensor],
        objective: Objective,
        *,
        batch_size: int = 8,
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            decode: latents [b, *latent] to images, differentiable.
            batch_size: number of rows that are decoded and scored at once.
            resident: a context in which the decoder is on the device.
        """
        self.stage = stage
        self.decode = decode
        self.score = objective
        self.batch_size = batch_size
        self.resident = resident

    def sample(self, rows: RolloutTrack[LatentSegment], num_steps: int, gradient: GradientMask) -> Tensor:
        """[B, *latent] the samples of `rows`, sampled again from the same noise under the current weights.

        Args:
            num_steps: number of steps of the schedule to take. If it is below T, the sample is the prediction of x_0
                at the last of them.
        """
        segment = rows.segment
        start_ids = rows.group_ids if segment.init_same_noise else rows.sample_ids
        x_T = noise_source(segment).normal(start_ids, "x", segment.final.shape[1:])  # noqa: N806
        return self._sample(rows, x_T.to(segment.final.device), resampling_params(segment, num_steps), gradient)

    def denoise_again(self, rows: RolloutTrack[LatentSegment], num_steps: int, x0: Tensor, copy: int) -> Tensor:
        """[B, *latent] x0, noised to the level of the last of `num_steps` steps and denoised by that step again.

        The result has the gradient of this step; x0 is detached.

        Args:
            copy: 1, 2, ...; selects the noise, which is keyed by each row's id and the name `t{copy}`.
        """
        segment = rows.segment
        sigma = segment.sigmas.tolist()[num_steps - 1]
        eps = noise_source(segment).normal(rows.sample_ids, f"t{copy}", x0.shape[1:]).to(x0)
        last = replace(resampling_params(segment, 1), sigmas=(sigma, 0.0))
        return self._sample(rows, (1.0 - sigma) * x0.detach() + sigma * eps, last, GradientMask(steps=(0,)))

    def velocity(self, rows: RolloutTrack[LatentSegment]) -> Tensor:
        """[B, *latent] the guided velocity at the samples of the rollout, each noised to a random level.

        Level and noise are keyed by each row's id and the names `t` and `t0`. A row of weight 0 counts as a sample of
        zeros, whatever it contains.
        """
        segment = rows.segment
        noise, final = noise_source(segment), segment.final.float()
        x0 = torch.where(per_row(rows.weight, final) > 0, final, 0.0)
        t = noise.uniform(rows.sample_ids, "t", ()).to(x0.device)
        eps = noise.normal(rows.sample_ids, "t0", x0.shape[1:]).to(x0)
        x = (1.0 - per_row(t, x0)) * x0 + per_row(t, x0) * eps
        network = partial(self.stage.velocity, sigma=t, conditions=rows.conditions, guidance=segment.guidance)
        return GradientMask(steps=(0,)).velocity(0, network, x)

    def objective(self, latents: Tensor, rows: RolloutTrack[LatentSegment]) -> Tensor:
        """Rewards [B] float32 of latents [B, *latent] as samples of `rows`; differentiable once."""
        if rows.prompts is None:
            raise ValueError("the rows have no prompts, but the reward of a sample depends on its prompt")
        rewards: Tensor = _RewardWithGradient.apply(latents, partial(self._score_with_gradient, prompts=rows.prompts))
        return rewards

    def _sample(
        self,
        rows: RolloutTrack[LatentSegment],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        gradient: GradientMask,
    ) -> Tensor:
        noise, guidance = noise_source(rows.segment), rows.segment.guidance
        return self.stage.sample(rows.conditions, x_T, params, noise, rows.sample_ids, gradient, guidance).final

    def _score_with_gradient(
        self, latents: Tensor, prompts: Sequence[str], with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Rewards [B], and their gradients [B, *latent], or zeros if `with_gradient` is False."""
        rewards, gradients = latents.new_zeros(len(latents)), torch.zeros_like(latents)
        multiple = self.stage.facts.batch_multiple
        size = balanced_chunk_size(len(latents), self.batch_size, multiple)
        with self.resident(), torch.set_grad_enabled(with_gradient):
            for chunk in padded_chunks(len(latents), size, multiple):
                rows, real_rows = list(chunk.rows), list(chunk.rows[: chunk.num_real])
                leaf = latents[rows].detach().requires_grad_(with_gradient)
                chunk_rewards = self.score(self.decode(leaf), [prompts[row] for row in rows])
                rewards[real_rows] = chunk_rewards[: chunk.num_real].detach().to(rewards)
                if with_gradient:
                    # Row b's reward depends on row b alone, so the sum's gradient holds the gradient of each.
                    gradients[real_rows] = torch.autograd.grad(chunk_rewards.sum(), leaf)[0][: chunk.num_real]
                progress("reward with gradient of a chunk")
        return rewards, gradients


class _RewardWithGradient(torch.autograd.Function):
    """Rewards [B] of latents [B, *latent]. Stores one gradient per latent for the backward pass."""

    @staticmethod
    def forward(ctx: Any, latents: Tensor, score: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        rewards, gradients = score(latents, with_gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(gradients)
        return rewards

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradients,) = ctx.saved_tensors
        weights = per_row(grad, gradients)
        # A row of weight 0 has gradient 0, even if its own gradient is not finite.
        return torch.where(weights == 0, 0.0, weights * gradients), None


def noise_source(segment: LatentSegment) -> NoiseSource:
    """The noise from which the segment was sampled."""
    return NoiseSource(segment.seed, "r", segment.step)


def resampling_params(segment: LatentSegment, num_steps: int) -> DiffusionSamplingParams:
    """Pinned settings that sample the segment again, in float32, with only the first `num_steps` steps.

    The last of these steps goes to sigma 0: Euler's step from any sigma to 0 ends in the prediction x - sigma v of x_0.
    """
    sigmas = segment.sigmas.tolist()
    return DiffusionSamplingParams(
        kernel=segment.kernel,
        solver=segment.solver,
        num_inference_steps=num_steps,
        sigmas=(*sigmas[:num_steps], 0.0),
        sde_indices=tuple(i for i in segment.sde_indices if i < num_steps - 1),
        seed=segment.seed,
    )
