"""Losses on clean samples learn: on a flow with a known velocity field each one raises the reward that it is given."""

import pytest

from tests.algorithms.flows import Method
from tests.algorithms.toys import GAUSSIAN
from unirl.algorithms.diffusion_awm import DiffusionAWM
from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.diffusion_rwr import DiffusionRWR
from unirl.algorithms.shared.advantages import BestOfGroup
from unirl.algorithms.shared.training_times import LogitNormalTimes
from unirl.sde.kernels import EulerODE
from unirl.train.configs import EmaLoraConfig

OLD = EmaLoraConfig()


def method(algorithm, **options) -> Method:
    return Method(algorithm=algorithm, kernel=EulerODE(), learning_rate=1e-2, **options)


METHODS = {
    "nft": method(DiffusionNFT(velocity_coef=0.0, times_per_forward=8), num_updates=1, old=OLD),
    "nft, bold": method(DiffusionNFT(beta=0.1, velocity_coef=0.0, times_per_forward=8), old=OLD),
    "awm": method(DiffusionAWM(velocity_coef=0.0, times_per_forward=8)),
    "awm, clipped": method(
        DiffusionAWM(
            surrogate="uniform", clip_range=0.2, velocity_coef=0.0, times=LogitNormalTimes(), times_per_forward=4
        )
    ),
    "online dpo": method(DiffusionDPO(beta=10.0, pairs_per_group=12, times_per_forward=8)),
    "rwr": method(DiffusionRWR(temperature=0.5, times_per_forward=8)),
    "sft": method(DiffusionRWR(weighting="advantage", times_per_forward=8), advantage=BestOfGroup()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_gaussian_flow_goes_most_of_the_way_to_its_reward(name: str) -> None:
    result = GAUSSIAN.learn(METHODS[name], steps=26)
    assert result.rewards[0] == pytest.approx(GAUSSIAN.start, abs=0.3)  # but for steps of finite size
    assert result.end >= 0.2 * result.rewards[0]  # four fifths of the way


def test_a_loss_without_a_sign_learns_nothing() -> None:
    """Plain fine-tuning on all samples: what the others gain comes from the reward."""
    alike = method(DiffusionRWR(temperature=1e6, times_per_forward=8))
    assert abs(GAUSSIAN.learn(alike, steps=20).gain()) < 0.15
