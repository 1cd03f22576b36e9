"""Losses learn: on flows with known velocity fields, every method raises the reward that it is trained on."""

import pytest
import torch

from tests.algorithms.flows import Flow, Method, T, mixture_velocity, train
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowSDEStrategy
from unirl.types.protocols import Kernel

GRPO = DiffusionGRPO(clip_range=0.05, steps_per_forward=T - 1)


@pytest.mark.parametrize(
    "kernel",
    [FlowSDEStrategy(eta=0.7), DanceSDEStrategy(eta=0.5), CPSSDEStrategy(eta=0.8)],
    ids=["flow", "dance", "cps"],
)
def test_grpo_moves_a_gaussian_flow_towards_its_reward(kernel: Kernel) -> None:
    flow = Flow(mixture_velocity(torch.zeros(1, 8), 0.5), size=8)
    run = train(flow, 8, lambda x0: -(x0 - 1).square().mean(1), Method(algorithm=GRPO, kernel=kernel), steps=40)
    assert run.rewards[0] == pytest.approx(-1.25, abs=0.3)  # -(1 + 0.25), but for steps of finite size
    assert run.gain() >= 0.5  # the optimum is 0


def test_grpo_moves_a_mixture_to_the_rewarded_mode_by_small_steps() -> None:
    means = torch.tensor([[1.5, 0.0], [-1.5, 0.0]])
    flow = Flow(mixture_velocity(means, 0.3), size=2)
    run = train(flow, 2, lambda x0: torch.exp(-(x0 - means[0]).square().sum(1)), Method(algorithm=GRPO), steps=40)
    assert run.rewards[0] == pytest.approx(0.5 / (1 + 2 * 0.3**2), abs=0.1)  # half the samples, each E[exp(-|z|^2)]
    assert run.gain() >= 0.3
    first, second = run.updates[0::2], run.updates[1::2]
    assert all(u["train/ratio_mean"] == 1.0 and u["train/approx_kl"] == 0.0 for u in first)
    assert all(abs(u["train/ratio_mean"] - 1) < 0.01 and u["train/approx_kl"] < 1e-3 for u in second)
    assert any(u["train/approx_kl"] > 0 for u in second)
