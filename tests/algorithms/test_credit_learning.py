"""Estimators teach: a Gaussian flow climbs to its reward whatever measures its advantages."""

import pytest

from tests.algorithms.flows import Method, T
from tests.algorithms.toys import GAUSSIAN
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.advantages import Estimator, GroupAdvantage, RunningAdvantage
from unirl.algorithms.shared.groups import Selection
from unirl.sde.kernels import CPSSDEStrategy

GRPO = DiffusionGRPO(clip_range=0.05, steps_per_forward=T - 1)
ESTIMATORS: dict[str, Estimator] = {
    "rloo": GroupAdvantage(std="none", leave_one_out=True),
    "reinforce++": GroupAdvantage(scope="global"),
    "ddpo": RunningAdvantage(buffer_size=48, min_count=24),
    "best 4 and worst 4 of 24": GroupAdvantage(select=Selection(keep=8)),
}


METHODS = {
    name: Method(algorithm=GRPO, kernel=CPSSDEStrategy(eta=0.8), advantage=estimator)
    for name, estimator in ESTIMATORS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_estimator_moves_a_gaussian_flow_towards_its_reward(name: str) -> None:
    run = GAUSSIAN.learn(METHODS[name], steps=25)
    assert run.rewards[0] == pytest.approx(GAUSSIAN.start, abs=0.3)
    assert run.gain() >= 0.6  # the optimum is 0
