"""Samples whose reward can be differentiated: what a loss on the reward's own gradient works with.

    rows --the stage's own sampling, again, gradients on some steps--> x_0 --decode, score--> reward [B] --> gradient

Decoder and scorer run forward and backward at once, a few rows at a time: what is kept of them until the backward pass
through the denoising steps is one gradient per latent.
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
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class Objective(Protocol):
    """A reward with a gradient."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] rewards of images [B, 3, H, W] in [0, 1], not rounded; each row by itself."""
        ...


class DifferentiableStage:
    """A policy together with what its samples are trained on."""

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
            batch_size: rows decoded and scored at once.
            resident: has the decoder on the device inside.
        """
        self.stage = stage
        self.decode = decode
        self.score = objective
        self.batch_size = batch_size
        self.resident = resident

    def sample(self, rows: RolloutTrack, num_steps: int, gradient: GradientMask) -> Tensor:
        """[B, *latent] the samples of `rows`, drawn again under the current weights from the same noise.

        Args:
            num_steps: of the schedule; below T, the clean prediction of the last of them is the sample.
        """
        segment = rows.segment
        start_ids = rows.group_ids if segment.init_same_noise else rows.sample_ids
        x_T = noise_of(segment).normal(start_ids, "x", segment.final.shape[1:]).to(segment.final.device)  # noqa: N806
        return self._sample(rows, x_T, params_of(segment, num_steps), gradient)

    def denoise_again(self, rows: RolloutTrack, num_steps: int, x0: Tensor, copy: int) -> Tensor:
        """[B, *latent] samples x0 of `num_steps` steps noised to the last step's level, and that step taken anew.

        It carries the step's gradient, x0 none.

        Args:
            copy: which noise: the draw `t{copy}` of each row's id; 1, 2, ...
        """
        segment = rows.segment
        sigma = segment.sigmas.tolist()[num_steps - 1]
        eps = noise_of(segment).normal(rows.sample_ids, f"t{copy}", x0.shape[1:]).to(x0)
        last = replace(params_of(segment, 1), sigmas=(sigma, 0.0))
        return self._sample(rows, (1.0 - sigma) * x0.detach() + sigma * eps, last, GradientMask(steps=(0,)))

    def velocity(self, rows: RolloutTrack) -> Tensor:
        """[B, *latent] the guided velocity at the rollout's samples, each noised to a random level: draws `t` and `t0`.

        A row of weight 0 stands for a sample of zeros, whatever it holds.
        """
        segment = rows.segment
        noise, final = noise_of(segment), segment.final.float()
        x0 = torch.where(per_row(rows.weight, final) > 0, final, 0.0)
        t = noise.uniform(rows.sample_ids, "t", ()).to(x0.device)
        eps = noise.normal(rows.sample_ids, "t0", x0.shape[1:]).to(x0)
        x = (1.0 - per_row(t, x0)) * x0 + per_row(t, x0) * eps
        network = partial(self.stage.velocity, sigma=t, conditions=rows.conditions, guidance=segment.guidance)
        return GradientMask(steps=(0,)).velocity(0, network, x)

    def objective(self, latents: Tensor, rows: RolloutTrack) -> Tensor:
        """[B] float32 the reward of latents [B, *latent] as samples of `rows`, differentiable once."""
        if rows.prompts is None:
            raise ValueError("the rows carry no prompts, and the reward of a sample depends on its prompt")
        rewards: Tensor = _Rewarded.apply(latents, partial(self._judge, prompts=rows.prompts))
        return rewards

    def _sample(
        self,
        rows: RolloutTrack,
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        gradient: GradientMask,
    ) -> Tensor:
        noise, guidance = noise_of(rows.segment), rows.segment.guidance
        return self.stage.sample(rows.conditions, x_T, params, noise, rows.sample_ids, gradient, guidance).final

    def _judge(self, latents: Tensor, prompts: Sequence[str], with_slope: bool) -> tuple[Tensor, Tensor]:
        """Rewards [B] and, if asked for, their gradients [B, *latent], else zeros."""
        rewards, slopes = latents.new_zeros(len(latents)), torch.zeros_like(latents)
        multiple = self.stage.facts.batch_multiple
        size = balanced_chunk_size(len(latents), self.batch_size, multiple)
        with self.resident(), torch.set_grad_enabled(with_slope):
            for chunk in padded_chunks(len(latents), size, multiple):
                rows, kept = list(chunk.rows), list(chunk.rows[: chunk.num_real])
                leaf = latents[rows].detach().requires_grad_(with_slope)
                found = self.score(self.decode(leaf), [prompts[row] for row in rows])
                rewards[kept] = found[: chunk.num_real].detach().to(rewards)
                if with_slope:
                    # Row b's reward depends on row b alone, so the sum's gradient holds the gradient of each.
                    slopes[kept] = torch.autograd.grad(found.sum(), leaf)[0][: chunk.num_real]
        return rewards, slopes


class _Rewarded(torch.autograd.Function):
    """Rewards [B] of latents [B, *latent], whose graph is one gradient per latent."""

    @staticmethod
    def forward(
        ctx: Any, latents: Tensor, judge: Callable[..., tuple[Tensor, Tensor]]
    ) -> Tensor:  # a bag of attributes
        rewards, slopes = judge(latents, with_slope=ctx.needs_input_grad[0])
        ctx.save_for_backward(slopes)
        return rewards

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        weights = per_row(grad, slopes)
        # A row that counts nowhere passes nothing on, even if its slope is not finite.
        return torch.where(weights == 0, 0.0, weights * slopes), None


def noise_of(segment: LatentSegment) -> NoiseSource:
    """The draws that the segment came from."""
    return NoiseSource(segment.seed, "r", segment.step)


def params_of(segment: LatentSegment, num_steps: int) -> DiffusionSamplingParams:
    """The pinned settings that draw the segment's samples again, in float32, stopping after `num_steps` steps.

    The stop is a shorter schedule: Euler's step from any sigma to 0 ends in the clean prediction x - sigma v.
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
