"""`check_environment` passes environments of Gymnasium, and finds each broken rule."""

import re
from collections.abc import Sequence

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from tests.processes import run_python
from tests.source_tree import ROOT
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.testing import check_environment
from unirl.testing.toy_environments import BOUND, HORIZON, FaultyEnvironment, LQREnvironment, best_return, riccati
from unirl.types.environments import EpisodeStart

LQR = "unirl.testing.toy_environments:LQR-v0"
FAULTY = "unirl.testing.toy_environments:Faulty-v0"


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "Reacher-v5", LQR, FAULTY])
def test_environments_of_gymnasium_pass(id):
    check_environment(GymnasiumEnvironment(id=id))


@pytest.mark.parametrize("make", [LQREnvironment, FaultyEnvironment])
def test_the_toy_environments_pass_gymnasiums_check(make):
    check_env(make(), skip_render_check=True)


def returns_of(gains: Sequence[np.ndarray], episodes: int) -> np.ndarray:
    environment = GymnasiumEnvironment(id=LQR)
    slots = list(range(episodes))
    observations = environment.reset(slots, [EpisodeStart(seed=slot) for slot in slots])
    total = torch.zeros(episodes)
    for gain in gains:
        u = -observations["state"][:, :2].double() @ torch.from_numpy(gain).T
        assert u.abs().max() < BOUND
        step = environment.step(slots, (u / BOUND).float())
        observations, total = step.observations, total + step.rewards
    assert bool(step.terminated.all())
    return total.numpy()


def test_the_gains_of_riccati_reach_the_best_return_and_others_do_not():
    gains, _ = riccati()
    assert len(gains) == HORIZON
    best = returns_of(gains, 2000)
    error = best.std() / np.sqrt(len(best))
    assert abs(best.mean() - best_return()) < 4 * error
    for scale in (0.8, 1.25):  # the same starts and noise, so that the difference is sharp
        worse = returns_of([scale * gain for gain in gains], 2000)
        assert (best - worse).mean() > 4 * (best - worse).std() / np.sqrt(len(best))


class Unseeded(gymnasium.Wrapper):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None, options=options)


class OutOfBounds(GymnasiumEnvironment):
    def step(self, slots, actions):
        result = super().step(slots, actions)
        result.rewards.add_(actions.float().reshape(len(slots), -1).abs().amax(1))
        return result


class StepsOn(GymnasiumEnvironment):
    def step(self, slots, actions):
        self._running.update(slots)
        return super().step(slots, actions)


class WrongShape(GymnasiumEnvironment):
    def reset(self, slots, starts):
        return {"state": super().reset(slots, starts)["state"][:, :1]}


class Numbered(GymnasiumEnvironment):
    def step(self, slots, actions):
        result = super().step(slots, actions)
        result.rewards.add_(torch.tensor(slots))
        return result


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (OutOfBounds, "was not clipped"),
        (StepsOn, "took another step"),
        (WrongShape, r"has shape \[2, 1\], expected \[2, 3\]"),
        (Numbered, "depends on its slot"),
    ],
)
def test_each_broken_rule_is_found(environment, why):
    with pytest.raises(AssertionError, match=why):
        check_environment(environment(id=LQR))


def test_starts_that_are_not_keyed_are_found():
    gymnasium.register("Unseeded-v0", entry_point=lambda render_mode=None: Unseeded(LQREnvironment()))
    with pytest.raises(AssertionError, match="is_keyed must be False"):
        check_environment(GymnasiumEnvironment(id="Unseeded-v0"))


def test_the_environment_of_the_page_runs_and_passes(tmp_path):
    page = (ROOT / "docs" / "embodied.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "points.py").write_text(code)
    status, output = run_python(["points.py"], tmp_path)
    assert status == 0, output
