"""GRPO learns: on flows with known velocity fields, every kernel raises the reward it is trained on.

Each policy is an exact flow plus a small network that starts at zero, so pre-training is a formula.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from unirl.algorithms.advantages import GroupAdvantage
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.diffusion import DiffusionStage
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_facts
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.types.conditions import Conditions
from unirl.types.primitives import Texts
from unirl.types.protocols import Kernel, ModelFacts
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS, SIBLINGS, T = 4, 24, 8


class Flow(nn.Module):
    """v(x, sigma) = base(x, sigma) + net(x, sigma), net zero at first."""

    def __init__(self, base: Callable[[Tensor, Tensor], Tensor], size: int, width: int = 32) -> None:
        super().__init__()
        self.base = base
        self.net = nn.Sequential(nn.Linear(size + 1, width), nn.Tanh(), nn.Linear(width, size))
        with torch.no_grad():
            for i, parameter in enumerate(self.net.parameters()):
                parameter.normal_(std=0.5 * (i == 0), generator=torch.Generator().manual_seed(i))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.base(x, sigma[:, None]) + self.net(torch.cat([x, sigma[:, None]], dim=1))

    @property
    def facts(self) -> ModelFacts:
        return toy_facts(batch_multiple=1)

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
    """What a training run looked like."""

    rewards: list[float]
    updates: list[dict[str, float]]

    def gain(self) -> float:
        """The mean reward of the last five steps less that of the first five."""
        return sum(self.rewards[-5:]) / 5 - sum(self.rewards[:5]) / 5


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


def train(flow: Flow, size: int, reward: Callable[[Tensor], Tensor], kernel: Kernel, steps: int) -> Run:
    backend = FSDPBackend(flow, optimizer_cfg=OptimizerConfig(learning_rate=3e-3))
    stage = DiffusionStage(flow, flow.facts)
    algorithm = DiffusionGRPO(clip_range=0.05, steps_per_forward=T - 1)
    stack = TrainStack(backend, algorithm, stage, micro_batch_size=999, num_updates_per_batch=2)
    sigmas = tuple(flow.facts.schedule.sigmas(T, 1).tolist())
    params = DiffusionSamplingParams(kernel=kernel, num_inference_steps=T).pinned(0, sigmas)
    run = Run([], [])
    for step in range(steps):
        track = rollout(stage, size, params, step)
        track = track.replace(rewards=reward(track.segment.final))
        track, _ = track.compute_advantages(GroupAdvantage())
        run.updates += [values(update) for update in stack.train_track(track).updates]
        run.rewards.append(float(track.rewards.mean()))
    return run


@pytest.mark.parametrize(
    "kernel",
    [FlowSDEStrategy(eta=0.7), DanceSDEStrategy(eta=0.5), CPSSDEStrategy(eta=0.8)],
    ids=["flow", "dance", "cps"],
)
def test_grpo_moves_a_gaussian_flow_towards_its_reward(kernel: Kernel) -> None:
    flow = Flow(mixture_velocity(torch.zeros(1, 8), 0.5), size=8)
    run = train(flow, 8, lambda x0: -(x0 - 1).square().mean(1), kernel, steps=40)
    assert run.rewards[0] == pytest.approx(-1.25, abs=0.3)  # -(1 + 0.25), but for steps of finite size
    assert run.gain() >= 0.5  # the optimum is 0


def test_grpo_moves_a_mixture_to_the_rewarded_mode_by_small_steps() -> None:
    means = torch.tensor([[1.5, 0.0], [-1.5, 0.0]])
    flow = Flow(mixture_velocity(means, 0.3), size=2)
    run = train(flow, 2, lambda x0: torch.exp(-(x0 - means[0]).square().sum(1)), FlowSDEStrategy(eta=0.7), steps=40)
    assert run.rewards[0] == pytest.approx(0.5 / (1 + 2 * 0.3**2), abs=0.1)  # half the samples, each E[exp(-|z|^2)]
    assert run.gain() >= 0.3
    first, second = run.updates[0::2], run.updates[1::2]
    assert all(u["train/ratio_mean"] == 1.0 and u["train/approx_kl"] == 0.0 for u in first)
    assert all(abs(u["train/ratio_mean"] - 1) < 0.01 and u["train/approx_kl"] < 1e-3 for u in second)
    assert any(u["train/approx_kl"] > 0 for u in second)
