"""Flows to be taught: how much reward each gives before training is known, and how much it can give at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.algorithms.flows import Flow, Method, Run, T, mixture_velocity, rollout, train
from unirl.algorithms.drtune import RewardBackprop
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.kernels import EulerODE
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.types.results import values
from unirl.types.sampling import DiffusionSamplingParams


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A mixture of equal Gaussians as a flow, and a reward of its samples."""

    means: Tensor  # [M, D]
    std: float
    reward: Callable[[Tensor], Tensor]
    """[B, D] samples to [B] rewards."""
    start: float
    """The expected reward of the exact flow; denoising steps of finite size change it a little."""
    optimum: float
    """The largest reward that a sample can have."""

    @property
    def size(self) -> int:
        return self.means.shape[1]

    def flow(self, seed: int = 0) -> Flow:
        return Flow(mixture_velocity(self.means, self.std), self.size, seed=seed)

    def learn(self, method: Method, steps: int, seed: int = 42, init: int = 0) -> Run:
        """Train a new flow by rewards."""
        return train(self.flow(init), self.size, self.reward, method, steps, seed)

    def learn_by_gradient(
        self, algorithm: RewardBackprop, steps: int, num_updates: int = 1, seed: int = 42, init: int = 0
    ) -> Run:
        """Train a new flow by the gradient of the reward, on samples of the ODE."""
        flow = self.flow(init)
        stage = DiffusionStage(flow, flow.facts)
        both = DifferentiableStage(stage, lambda latents: latents, self.of_images)
        backend = FSDPBackend(flow, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
        stack = TrainStack(backend, algorithm, both, micro_batch_size=96, num_updates_per_batch=num_updates)
        sigmas = tuple(flow.facts.schedule.sigmas(T, 1).tolist())
        params = DiffusionSamplingParams(kernel=EulerODE(), num_inference_steps=T, seed=seed).pinned(0, sigmas)
        run = Run([], [])
        for step in range(steps):
            track = rollout(stage, self.size, params, step)
            track = track.replace(prompts=[""] * len(track))
            run.rewards.append(float(self.reward(track.segment.final).mean()))
            run.updates += [values(update) for update in stack.train_track(track).updates]
        return run

    def of_images(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.reward(images)


GAUSSIAN = Toy(
    means=torch.zeros(1, 8),
    std=0.5,
    reward=lambda x0: -(x0 - 1).square().mean(1),
    start=-(1 + 0.5**2),
    optimum=0.0,
)
"""N(0, 1/4) in eight dimensions, rewarded for being near 1."""

_TWO = torch.tensor([[1.5, 0.0], [-1.5, 0.0]])
MIXTURE = Toy(
    means=_TWO,
    std=0.3,
    reward=lambda x0: torch.exp(-(x0 - _TWO[0]).square().sum(1)),
    start=0.5 / (1 + 2 * 0.3**2),  # half the samples, each E[exp(-|z|^2)]
    optimum=1.0,
)
"""Two narrow modes in the plane, one of them rewarded."""

_ANGLES = torch.arange(8) * torch.pi / 4
_RING = 1.5 * torch.stack([_ANGLES.cos(), _ANGLES.sin()], dim=1)


def mean_bump(means: Tensor, std: float, width: float) -> float:
    """E[exp(-|x - m_0|^2 / (2 width^2))] of a mixture of equal Gaussians around `means` [M, D], m_0 their first."""
    variance, size = width**2 + std**2, means.shape[1]
    bumps = torch.exp(-(means - means[0]).square().sum(1) / (2 * variance))
    return float(bumps.mean()) * (width**2 / variance) ** (size / 2)


RING = Toy(
    means=_RING,
    std=0.15,
    reward=lambda x0: torch.exp(-(x0 - _RING[0]).square().sum(1)),
    start=mean_bump(_RING, std=0.15, width=0.5**0.5),
    optimum=1.0,
)
"""Eight narrow modes on a circle, of which one is rewarded most and its neighbours a little."""
