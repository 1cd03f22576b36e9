"""Losses learn: on flows with known velocity fields, every method raises the reward that it is trained on."""

from typing import Any

import pytest

from tests.algorithms.flows import Method, Run, T
from tests.algorithms.toys import GAUSSIAN, MIXTURE
from unirl.algorithms.diffusion_dppo import DiffusionDPPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.denoising import DenoisingLoss
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowDDIM, FlowSDEStrategy
from unirl.types.protocols import Kernel


def grpo(clip_range: float = 0.05, **options: Any) -> DiffusionGRPO:
    return DiffusionGRPO(clip_range=clip_range, steps_per_forward=T - 1, **options)


def on_a_gaussian(method: Method, steps: int = 24) -> Run:
    run = GAUSSIAN.learn(method, steps)
    assert run.rewards[0] == pytest.approx(GAUSSIAN.start, abs=0.3)  # but for steps of finite size
    return run


def on_a_mixture(method: Method) -> Run:
    run = MIXTURE.learn(method, steps=40)
    assert run.rewards[0] == pytest.approx(MIXTURE.start, abs=0.1)
    return run


KERNELS: dict[str, Kernel] = {
    "flow": FlowSDEStrategy(eta=0.7),
    "dance": DanceSDEStrategy(eta=0.5),
    "cps": CPSSDEStrategy(eta=0.8),
    "ddpo": FlowDDIM(eta=1.0),
}


@pytest.mark.parametrize("name", KERNELS)
def test_grpo_moves_a_gaussian_flow_towards_its_reward(name: str) -> None:
    assert on_a_gaussian(Method(algorithm=grpo(), kernel=KERNELS[name])).gain() >= 0.5


TRUST_REGIONS: dict[str, DenoisingLoss] = {
    "dual clip": grpo(0.003, dual_clip=1.003),
    "guard": grpo(0.001, ratio="guard", step_weights="inverse_dt"),
    "tempflow": grpo(0.003, step_weights="tempflow"),
    "flash": grpo(0.003, step_weights="flash"),
    "dppo": DiffusionDPPO(kl_threshold=2e-5, steps_per_forward=T - 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUST_REGIONS)
def test_a_trust_region_that_acts_on_every_fourth_ratio_still_lets_a_method_learn(name: str) -> None:
    run = on_a_gaussian(Method(algorithm=TRUST_REGIONS[name], num_updates=4))
    assert run.gain() >= 0.5
    first, last = run.updates[0::4], run.updates[3::4]  # on, and furthest from, the policy that sampled
    assert all(update["train/ratio_mean"] == 1.0 and update["train/clip_fraction"] == 0.0 for update in first)
    assert sum(update["train/clip_fraction"] for update in last) / len(last) > 0.1


@pytest.mark.slow
def test_with_a_reference_kl_the_optimum_is_lower_and_the_kl_bounded() -> None:
    free, held, rewarded, damped = (
        on_a_gaussian(Method(algorithm=algorithm))
        for algorithm in (
            grpo(kl_coef=1e-9),  # so small that it only measures
            grpo(kl_coef=1.0),
            grpo(kl_coef=1.0, kl_in="reward"),
            grpo(velocity_coef=0.03),
        )
    )

    def distance(run: Run) -> float:
        return max(update["train/kl"] for update in run.updates)

    assert free.gain() >= 0.5
    for run in (free, held, rewarded):  # the reference is the policy at initialisation
        assert run.updates[0]["train/kl"] == 0.0 and run.updates[2]["train/kl"] != 0.0
    for run in (held, rewarded):
        assert 0.1 <= run.gain() <= free.gain() - 0.3
        assert distance(run) <= 0.3 * distance(free)
    assert abs(held.gain() - rewarded.gain()) <= 0.1  # one coefficient, two places, one optimum
    assert 0.1 <= damped.gain() <= free.gain() - 0.1


@pytest.mark.slow
def test_grpo_moves_a_mixture_to_the_rewarded_mode_by_small_steps() -> None:
    run = on_a_mixture(Method(algorithm=grpo()))
    assert run.gain() >= 0.3
    first, second = run.updates[0::2], run.updates[1::2]
    assert all(u["train/ratio_mean"] == 1.0 and u["train/approx_kl"] == 0.0 for u in first)
    assert all(abs(u["train/ratio_mean"] - 1) < 0.01 and u["train/approx_kl"] < 1e-3 for u in second)
    assert any(u["train/approx_kl"] > 0 for u in second)
