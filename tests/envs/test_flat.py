"""Nested observations and dictionaries of actions reach a policy as flat ones, and lose nothing on the way."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from unirl.config.errors import IncompatibleError
from unirl.envs.flat import with_flat_spaces
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.spaces import codec_of
from unirl.testing import check_environment
from unirl.types.environments import ContinuousActions, EpisodeStart


class Grouped(gymnasium.Env[Any, Any]):
    """Observes its last action. The space has the layout of RoboCasa's: parts of an action by name, a text beside."""

    observation_space = spaces.Dict({
        "seen": spaces.Dict({
            "hand": spaces.Box(-9, 9, (2, 1), np.float32),
            "deep": spaces.Dict({"base": spaces.Box(-9, 9, (3,), np.float32)}),
        }),
        "words": spaces.Text(8),
    })  # fmt: skip
    action_space = spaces.Dict({
        "action.base": spaces.Box(0, 4, (3,), np.float32),
        "action.hand": spaces.Box(-1, 1, (2, 1), np.float64),
    })  # fmt: skip

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return self.seen({"action.base": np.zeros(3), "action.hand": np.zeros((2, 1))}), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.seen(action), float(action["action.base"][0]), False, False, {"success": True}

    def seen(self, action):
        return {"seen": {"hand": action["action.hand"], "deep": {"base": action["action.base"]}}, "words": "go"}


@pytest.fixture
def grouped():
    gymnasium.register("Grouped-v0", Grouped, max_episode_steps=5)
    yield "Grouped-v0"
    del gymnasium.registry["Grouped-v0"]


def test_each_part_of_an_action_comes_back_as_the_observation_of_its_path(grouped):
    environment = GymnasiumEnvironment(id=grouped, observation_keys=("seen.hand", "seen.deep.base"))
    assert environment.spaces.actions == ContinuousActions(5)
    assert environment.spaces.observations == {"seen.hand": (2, 1), "seen.deep.base": (3,)}
    environment.reset([0], [EpisodeStart(seed=0)])
    step = environment.step([0], torch.tensor([[-1.0, 0.0, 0.5, -0.25, 1.0]]))
    assert step.faults == {} and step.success.item()
    assert step.observations["seen.deep.base"].tolist() == [[0.0, 2.0, 3.0]]  # [-1, 1] to [0, 4]
    assert step.observations["seen.hand"].tolist() == [[[-0.25], [1.0]]]


def test_a_text_is_no_number_and_an_action_with_another_part_is_refused(grouped):
    with pytest.raises(IncompatibleError, match=r"observation 'words' of Grouped-v0 is Text"):
        GymnasiumEnvironment(id=grouped)
    mixed = Grouped()
    mixed.action_space = spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32), "b": spaces.Discrete(2)})
    with pytest.raises(IncompatibleError, match=r"Box \(of floats\), a Dict of these, or Discrete"):
        codec_of(with_flat_spaces(mixed).action_space, "mixed")


def test_flat_spaces_are_left_alone_and_keys_that_meet_are_refused():
    plain = gymnasium.make("CartPole-v1")
    assert with_flat_spaces(plain) is plain
    twice = Grouped()
    box = spaces.Box(-1, 1, (1,), np.float32)
    twice.observation_space = spaces.Dict({"a": spaces.Dict({"b": box}), "a.b": box})
    with pytest.raises(gymnasium.error.Error, match=r"two parts of its observation have the key 'a\.b'"):
        with_flat_spaces(twice)


@pytest.mark.parametrize("id", ["FetchReach-v4", "PointMaze_UMaze-v3"])
def test_environments_of_gymnasium_robotics_keep_the_contract(id):
    environment = GymnasiumEnvironment(id=f"gymnasium_robotics:{id}", max_steps=4)
    assert any(key.startswith("desired_goal") for key in environment.spaces.observations)
    check_environment(environment)


def test_the_kitchen_shows_what_its_own_dictionaries_hold():
    environment = GymnasiumEnvironment(id="gymnasium_robotics:FrankaKitchen-v1")
    seen = environment.reset([0], [EpisodeStart(seed=3)])
    plain = gymnasium.make("gymnasium_robotics:FrankaKitchen-v1", disable_env_checker=True)
    expected, _ = plain.reset(seed=3)
    for group in ("achieved_goal", "desired_goal"):
        for name, value in expected[group].items():
            assert np.array_equal(seen[f"{group}.{name}"][0].numpy(), value.astype(np.float32))
    plain.close()
    environment.close()
