"""Episodes of our environments equal those of `gymnasium.make`, stepped by hand."""

import gymnasium
import numpy as np
import pytest
import torch

from unirl.config.errors import DependencyError, IncompatibleError, InvalidValueError
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.types.environments import ContinuousActions, EpisodeStart

SLOTS = (0, 3)


def actions_of(environment: GymnasiumEnvironment, steps: int) -> torch.Tensor:
    """Random actions [steps, 2] or [steps, 2, A], some of them outside of [-1, 1]."""
    generator = torch.Generator().manual_seed(1)
    space = environment.spaces.actions
    if isinstance(space, ContinuousActions):
        return torch.rand((steps, len(SLOTS), space.size), generator=generator) * 2.4 - 1.2
    return torch.randint(space.count, (steps, len(SLOTS)), generator=generator)


def by_hand(id: str, seed: int, actions: np.ndarray) -> list[tuple]:
    """The observations as float32, rewards and ends of one episode of Gymnasium."""
    environment = gymnasium.make(id)
    observation, _ = environment.reset(seed=seed)
    steps = [(observation.astype(np.float32), 0.0, False, False)]
    for action in actions:
        if isinstance(environment.action_space, gymnasium.spaces.Box):
            low, high = environment.action_space.low, environment.action_space.high
            action = (low + high) / 2 + (high - low) / 2 * np.clip(action, -1, 1)
        observation, reward, terminated, truncated, _ = environment.step(action)
        steps.append((observation.astype(np.float32), np.float32(reward), terminated, truncated))
        if terminated or truncated:
            break
    environment.close()
    return steps


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "Reacher-v5", "HalfCheetah-v5"])
def test_an_episode_equals_gymnasiums_own_bit_for_bit(id, workers):
    environment = GymnasiumEnvironment(id=id, workers=workers)
    actions = actions_of(environment, 60)
    expected = [by_hand(id, 7 + row, actions[:, row].numpy()) for row in range(len(SLOTS))]
    first = environment.reset(SLOTS, [EpisodeStart(seed=7 + row) for row in range(len(SLOTS))])
    for row in range(len(SLOTS)):
        assert np.array_equal(first["state"][row].numpy(), expected[row][0][0])
    alive = list(range(len(SLOTS)))
    for number, action in enumerate(actions, start=1):
        if not alive:
            break
        step = environment.step([SLOTS[row] for row in alive], action[alive])
        for place, row in enumerate(list(alive)):
            observation, reward, terminated, truncated = expected[row][number]
            assert np.array_equal(step.observations["state"][place].numpy(), observation)
            assert step.rewards[place] == reward
            assert (bool(step.terminated[place]), bool(step.truncated[place])) == (terminated, truncated)
        alive = [row for row in alive if number + 1 < len(expected[row])]
    environment.close()


def test_a_fall_terminates_and_the_step_limit_truncates():
    environment = GymnasiumEnvironment(id="CartPole-v1", max_steps=3)
    assert environment.spaces.most_steps == 3
    environment.reset([0], [EpisodeStart(seed=0)])
    ends = [environment.step([0], torch.tensor([k % 2])) for k in range(3)]
    assert [bool(step.truncated) for step in ends] == [False, False, True]
    assert not any(bool(step.terminated) for step in ends)
    with pytest.raises(AssertionError, match="Reset them first"):
        environment.step([0], torch.tensor([0]))

    falling = GymnasiumEnvironment(id="CartPole-v1")
    falling.reset([0], [EpisodeStart(seed=0)])
    step = falling.step([0], torch.tensor([1]))
    while not step.terminated:
        step = falling.step([0], torch.tensor([1]))
    assert abs(step.observations["state"][0, 2]) > np.deg2rad(12) and not bool(step.truncated)


def test_stacked_frames_end_with_the_newest_one():
    environment = GymnasiumEnvironment(id="Pendulum-v1", frame_stack=3)
    single = GymnasiumEnvironment(id="Pendulum-v1")
    assert environment.spaces.observations == {"state": (9,)}
    frames = [single.reset([0], [EpisodeStart(seed=3)])["state"][0]] * 3
    observations = environment.reset([0], [EpisodeStart(seed=3)])
    for action in torch.linspace(-1, 1, 5)[:, None, None]:
        assert torch.equal(observations["state"][0], torch.cat(frames))
        observations = environment.step([0], action).observations
        frames = [*frames[1:], single.step([0], action).observations["state"][0]]


def test_a_discrete_observation_is_one_hot():
    environment = GymnasiumEnvironment(id="CliffWalking-v1")
    observation = environment.reset([0], [EpisodeStart(seed=0)])["state"]
    assert observation.shape == (1, 48) and observation.sum() == 1 and observation[0, 36] == 1


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"id": "CartPol-v1"}, InvalidValueError, "Did you mean 'CartPole-v1'"),
        ({"id": "nothing_here:X-v1"}, DependencyError, "needs a module .*nothing_here"),
        ({"id": "Blackjack-v1"}, IncompatibleError, "FlattenObservation"),
        ({"id": "CartPole-v1", "kwargs": {"gravity": 1}}, InvalidValueError, "does not take kwargs"),
        ({"id": "CartPole-v1", "observation_keys": ("pixels",)}, InvalidValueError, "whose key is 'state'"),
    ],
)
def test_what_cannot_work_is_named_before_the_first_step(keys, error, why):
    with pytest.raises(error, match=why):
        GymnasiumEnvironment(**keys)
