"""Flows with known velocity fields, and the loop around a method that should raise their reward.

Each policy is an exact flow plus a small network that starts at zero, so pre-training is a formula.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.algorithms.shared.groups import in_pairs
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_facts
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaLoraConfig
from unirl.train.stack import TrainStack
from unirl.types.conditions import Conditions
from unirl.types.facts import LatentFacts
from unirl.types.primitives import Texts
from unirl.types.protocols import Kernel, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_resp import AdvantageEstimator, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS, SIBLINGS, T = 4, 24, 8
FLOW_SDE = FlowSDEStrategy(eta=0.7)
GROUP = GroupAdvantage()


class Flow(nn.Module):
    """v(x, sigma) = base(x, sigma) + net(x, sigma), net zero at first."""

    def __init__(self, base: Callable[[Tensor, Tensor], Tensor], size: int, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.base = base
        self.size = size
        self.net = nn.Sequential(nn.Linear(size + 1, width), nn.Tanh(), nn.Linear(width, size))
        with torch.no_grad():
            for i, parameter in enumerate(self.net.parameters()):
                parameter.normal_(std=0.5 * (i == 0), generator=torch.Generator().manual_seed(100 * seed + i))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.base(x, sigma[:, None]) + self.net(torch.cat([x, sigma[:, None]], dim=1))

    @property
    def facts(self) -> LatentFacts:
        """A value head reads all elements as channels, and no text."""
        return replace(toy_facts(batch_multiple=1), latent_channels=self.size, text_width=None)

    def trainable(self) -> nn.Module:
        return self


def mixture_velocity(means: Tensor, std: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The exact velocity E[eps - x0 | x] of equal Gaussians N(mean, std^2): x0 and eps are linear in x within each."""

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        variance = ((1 - sigma) * std) ** 2 + sigma**2  # [B, 1]
        residual = x[:, None] - (1 - sigma)[:, None] * means  # [B, M, D]
        posterior = (-0.5 * residual.square().sum(2) / variance).softmax(1)[..., None]
        x0 = means + (((1 - sigma) * std**2 / variance)[:, None]) * residual
        eps = (sigma / variance)[:, None] * residual
        return (posterior * (eps - x0)).sum(1)

    return velocity


@dataclass
class Run:
    """The rewards of a training run."""

    rewards: list[float]
    updates: list[dict[str, float]]

    def gain(self) -> float:
        """The mean reward of the last five steps less that of the first five."""
        return self.end - sum(self.rewards[:5]) / 5

    @property
    def end(self) -> float:
        """The mean reward of the last five steps."""
        return sum(self.rewards[-5:]) / 5


def rollout(stage: DiffusionStage, size: int, params: DiffusionSamplingParams, step: int) -> RolloutTrack:
    groups = [f"p{i}@{step}" for i in range(PROMPTS) for _ in range(SIBLINGS)]
    ids = [f"{group}:{i % SIBLINGS}" for i, group in enumerate(groups)]
    noise = NoiseSource(params.seed, "r", step)
    conditions: Conditions = {"text": Texts(texts=[""] * len(ids))}
    with torch.no_grad():
        segment = stage.sample(conditions, noise.normal(ids, "x", (size,)), params, noise, ids)
    return RolloutTrack(
        sample_ids=ids,
        group_ids=groups,
        conditions=conditions,
        segment=segment,
        weight=torch.ones(len(ids)),
        weight_version=torch.zeros(len(ids), dtype=torch.int64),
    )


@dataclass(frozen=True, kw_only=True)
class Method:
    """A loss and its settings, to be trained on a flow."""

    algorithm: StageAlgorithm[DiffusionStage]
    kernel: Kernel = FLOW_SDE
    sde_indices: tuple[int, ...] | None = None
    """Absent = all steps but the last."""
    advantage: AdvantageEstimator = GROUP
    num_updates: int = 2
    learning_rate: float = 3e-3
    old: EmaLoraConfig | None = None
    """Given: samples come from the snapshot `old`, which it moves."""


def train(flow: Flow, size: int, reward: Callable[[Tensor], Tensor], method: Method, steps: int, seed: int = 42) -> Run:
    optimizer = OptimizerConfig(learning_rate=method.learning_rate)
    backend = FSDPBackend(flow, seed, optimizer_cfg=optimizer, ema_lora_cfg=method.old)
    stage = DiffusionStage(flow, flow.facts)
    stack = TrainStack(
        backend, method.algorithm, stage, micro_batch_size=PROMPTS * SIBLINGS, num_updates_per_batch=method.num_updates
    )
    sigmas = tuple(flow.facts.schedule.sigmas(T, 1).tolist())
    params = DiffusionSamplingParams(
        kernel=method.kernel, num_inference_steps=T, sde_indices=method.sde_indices, seed=seed
    ).pinned(0, sigmas)
    run = Run([], [])
    for step in range(steps):
        with torch.no_grad(), backend.weights("old" if method.old else "live"):
            track = rollout(stage, size, params, step)
        track = track.replace(rewards=reward(track.segment.final))
        mean_reward = float(track.rewards.mean())
        track, _ = track.compute_advantages(method.advantage)
        if method.algorithm.needs.pairs:
            track = in_pairs(track, method.algorithm.needs.pairs)
        moment = TrainingProgress(progress=step / (steps - 1))
        run.updates += [values(update) for update in stack.train_track(track, moment).updates]
        run.rewards.append(mean_reward)
    return run
