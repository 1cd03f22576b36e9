"""Environments of Gymnasium: the same numbers as Gymnasium itself gives, and faults that stay in their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Env, make, register, registry
from gymnasium.spaces import Box, Discrete
from gymnasium.spaces import Dict as DictSpace

from unirl.config.errors import DependencyError, EpisodeError, IncompatibleError, InvalidValueError
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.types.environments import ContinuousActions, DiscreteActions, EpisodeStart


class Fragile(Env[Any, Any]):
    """Counts its steps. At step 3 it does what `how` says."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-2.0, 4.0, (1,), np.float32)

    def __init__(self, how: str = "", render_mode: str | None = None) -> None:
        self.how, self.made_broken = how, how == "never"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.made_broken:
            raise RuntimeError("it does not start")
        self.steps, self.mark = 0, float(self.np_random.integers(1000))
        return np.array([self.mark, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, reward = np.array([self.mark, float(action[0])]), float(self.steps)
        if self.steps == 3:
            match self.how:
                case "raise":
                    raise RuntimeError("the simulator crashed")
                case "nan observation":
                    observation[1] = np.nan
                case "infinite reward":
                    reward = np.inf
        return observation, reward, False, False, {"success": self.steps == 5}


register("Fragile-v0", Fragile)


@contextmanager
def as_id(make: Callable[..., Env[Any, Any]]) -> Iterator[str]:
    """An id for what `make` makes."""
    register("Made-v0", make)
    yield "Made-v0"
    del registry["Made-v0"]


def starts(*seeds: int) -> list[EpisodeStart]:
    return [EpisodeStart(seed=seed) for seed in seeds]


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "Reacher-v5"])
def test_a_trajectory_is_that_of_gymnasium_bit_for_bit(id: str) -> None:
    env, plain = GymnasiumEnvironment(id=id), make(id)
    generator = torch.Generator().manual_seed(0)
    ours = env.reset([4, 7], starts(11, 12))["state"][1]
    theirs, _ = plain.reset(seed=12)
    assert np.array_equal(ours.numpy(), theirs.astype(np.float32))
    for _ in range(40):
        if isinstance(env.spaces.actions, DiscreteActions):
            actions = torch.randint(2, (2,), generator=generator)
            given: Any = int(actions[1])
        else:
            assert isinstance(env.spaces.actions, ContinuousActions)
            actions = 3 * torch.rand(2, env.spaces.actions.size, generator=generator) - 1.5
            box: Any = plain.action_space
            given = (box.low + (actions[1].clamp(-1, 1).numpy() + 1) / 2 * (box.high - box.low)).astype(np.float32)
        step = env.step([4, 7], actions)
        observation, reward, terminated, truncated, _ = plain.step(given)
        assert np.allclose(step.observations["state"][1].numpy(), observation.astype(np.float32), atol=1e-6)
        assert float(step.rewards[1]) == pytest.approx(float(reward), abs=1e-6)
        assert (bool(step.terminated[1]), bool(step.truncated[1])) == (terminated, truncated)
        if terminated or step.terminated[0]:
            break


def test_a_time_limit_truncates_and_does_not_terminate() -> None:
    env = GymnasiumEnvironment(id="Pendulum-v1", max_steps=3)
    env.reset([0], starts(0))
    steps = [env.step([0], torch.zeros(1, 1)) for _ in range(3)]
    assert env.spaces.most_steps == 3
    assert [bool(step.truncated) for step in steps] == [False, False, True]
    assert not any(bool(step.terminated) for step in steps)


def test_a_start_is_a_function_of_its_seed_in_any_slot() -> None:
    env = GymnasiumEnvironment(id="CartPole-v1")
    first = env.reset([0, 1, 2], starts(1, 2, 3))["state"]
    again = env.reset([2, 5, 0], starts(1, 2, 3))["state"]
    assert torch.equal(first, again) and not torch.equal(first[0], first[1])


def test_actions_are_scaled_to_the_bounds_and_clipped() -> None:
    env = GymnasiumEnvironment(id="Fragile-v0")
    env.reset([0, 1, 2, 3], starts(0, 0, 0, 0))
    seen = env.step([0, 1, 2, 3], torch.tensor([[-1.0], [0.0], [1.0], [7.0]])).observations["state"][:, 1]
    assert seen.tolist() == [-2.0, 1.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "RuntimeError: the simulator crashed"),
        ("nan observation", "observation 'state' has 1 of 2 numbers that are not finite"),
        ("infinite reward", "the reward is inf"),
    ],
)
def test_a_fault_ends_the_episode_of_its_slot_alone_and_the_slot_starts_again(how: str, reason: str) -> None:
    with as_id(lambda **settings: Fragile(how)) as id:
        env = GymnasiumEnvironment(id=id)
        env.reset([0, 1], starts(5, 6))
        env.step([0], torch.zeros(1, 1))  # slot 0 is one step ahead
        env.step([0, 1], torch.zeros(2, 1))
        step = env.step([0, 1], torch.zeros(2, 1))
        assert step.faults == {0: reason} and step.truncated.tolist() == [True, False]
        assert torch.isfinite(step.rewards).all() and torch.isfinite(step.observations["state"]).all()
        assert env.reset([0], starts(5))["state"][0, 1] == 0.0
        assert not env.step([0], torch.zeros(1, 1)).faults


def test_a_slot_that_cannot_start_is_named() -> None:
    with as_id(lambda **settings: Fragile("never")) as id:
        env = GymnasiumEnvironment(id=id)
        with pytest.raises(EpisodeError, match=r"Made-v0 in slot 2 cannot start .*seed 9.*it does not start"):
            env.reset([2], starts(9))


def test_success_comes_from_the_environment() -> None:
    env = GymnasiumEnvironment(id="Fragile-v0")
    env.reset([0], starts(0))
    assert [bool(env.step([0], torch.zeros(1, 1)).success) for _ in range(6)] == [False] * 4 + [True, False]


class Strange(Env[Any, Any]):
    """Has the spaces that it is given."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space, self.action_space = observation, action


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (Box(-1, 1, (2,)), Box(-np.inf, np.inf, (2,)), "without finite bounds"),
        (DictSpace({"a": DictSpace({"b": Box(-1, 1, (2,))})}), Discrete(2), "A policy reads Box, Discrete, or a Dict"),
        (Box(-1, 1, (2,)), DictSpace({"a": Discrete(2)}), "A policy acts in Box"),
    ],
    ids=["bounds", "nested", "dictionary"],
)
def test_spaces_that_no_policy_fits_are_refused(observation: Any, action: Any, message: str) -> None:
    with (
        as_id(lambda **settings: Strange(observation, action)) as id,
        pytest.raises(IncompatibleError, match=message),
    ):
        GymnasiumEnvironment(id=id)


def test_mistakes_of_a_recipe_are_named() -> None:
    with pytest.raises(InvalidValueError, match=r"id=CartPol-v1 is no environment .*Did you mean 'CartPole-v1'"):
        GymnasiumEnvironment(id="CartPol-v1")
    with pytest.raises(InvalidValueError, match="does not take kwargs"):
        GymnasiumEnvironment(id="CartPole-v1", kwargs={"gravitation": 3})
    with pytest.raises(InvalidValueError, match="Leave out observation_keys"):
        GymnasiumEnvironment(id="CartPole-v1", observation_keys=("pixels",))


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.config.dependencies.is_installed", lambda module: False)
    with pytest.raises(DependencyError, match=r"needs gymnasium, not installed here: pip install 'unirl\[embodied\]'"):
        GymnasiumEnvironment(id="CartPole-v1")
