"""Estimators teach: a Gaussian flow climbs to its reward whatever measures its advantages."""

import pytest
import torch

from tests.algorithms.flows import Flow, Method, T, mixture_velocity, train
from unirl.algorithms.advantages import GroupAdvantage
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.estimator import Estimator
from unirl.algorithms.running import RunningAdvantage
from unirl.algorithms.selection import Selection
from unirl.sde.kernels import CPSSDEStrategy

GRPO = DiffusionGRPO(clip_range=0.05, steps_per_forward=T - 1)
ESTIMATORS: dict[str, Estimator] = {
    "rloo": GroupAdvantage(std="none", leave_one_out=True),
    "reinforce++": GroupAdvantage(scope="global"),
    "ddpo": RunningAdvantage(buffer_size=48, min_count=24),
    "best 4 and worst 4 of 24": GroupAdvantage(select=Selection(keep=8)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_moves_a_gaussian_flow_towards_its_reward(name: str) -> None:
    flow = Flow(mixture_velocity(torch.zeros(1, 8), 0.5), size=8)
    method = Method(algorithm=GRPO, kernel=CPSSDEStrategy(eta=0.8), advantage=ESTIMATORS[name])
    run = train(flow, 8, lambda x0: -(x0 - 1).square().mean(1), method, steps=25)
    assert run.rewards[0] == pytest.approx(-1.25, abs=0.3)
    assert run.gain() >= 0.6  # the optimum is 0
