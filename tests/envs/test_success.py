"""Rewards that a classifier reads from images, and environments that are scored by their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.config.load import load
from unirl.envs.pixel_reach import DiscReward, PixelReachEnvironment
from unirl.envs.scored import ScoredEnvironment
from unirl.envs.success import SuccessClassifier, SuccessReward
from unirl.envs.world_model import WorldModelEnvironment
from unirl.plan.preflight import preflight
from unirl.testing import check_environment
from unirl.types.environments import NOT_REPORTED, EnvironmentStep, EpisodeStart

SIDE, TASKS = 16, ("left", "right")
STARTS = [EpisodeStart(seed=seed) for seed in (3, 4, 5)]


def halves(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images of which one half is brighter, tasks that name a half, and whether it is the brighter one."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    bright, tasks = (torch.randint(2, (count,), generator=generator) for _ in range(2))
    sides = torch.where(torch.arange(SIDE) < SIDE // 2, 0, 1)
    images += 100 * (sides[None] == bright[:, None])[:, None, None].to(torch.uint8)
    return images, tasks, bright == tasks


@pytest.fixture(scope="module")
def classifier() -> SuccessClassifier:
    torch.manual_seed(0)
    made = SuccessClassifier((SIDE, SIDE), TASKS)
    made.fit(*halves(512, 0), updates=150, batch_size=64, learning_rate=3e-3)
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def file(classifier, tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("success") / "success.safetensors"
    classifier.write(path)
    return path


def test_a_classifier_learns_what_images_show_for_each_task(classifier) -> None:
    images, tasks, success = halves(256, 1)
    found = classifier.probabilities(images, [TASKS[task] for task in tasks])
    assert ((found >= 0.5) == success).float().mean() > 0.97
    other = classifier.probabilities(images, [TASKS[1 - task] for task in tasks])
    assert ((other >= 0.5) == ~success).float().mean() > 0.97


def test_the_bits_of_an_image_are_its_own(classifier) -> None:
    images, tasks, _ = halves(37, 2)
    told = [TASKS[task] for task in tasks]
    whole = classifier.probabilities(images, told)
    for rows in ([5], [36, 0], list(range(30, 3, -1))):
        assert torch.equal(classifier.probabilities(images[rows], [told[row] for row in rows]), whole[rows])


def test_what_is_written_is_read(classifier, file) -> None:
    images, tasks, _ = halves(8, 3)
    read, told = SuccessClassifier.read(file), [TASKS[task] for task in tasks]
    assert (read.size, read.tasks) == ((SIDE, SIDE), TASKS)
    assert torch.equal(read.probabilities(images, told), classifier.probabilities(images, told))


def test_a_reward_is_success_and_on_request_the_change_of_its_probability(classifier, file) -> None:
    images, _, _ = halves(3 * 5, 4)
    frames, tasks = images.view(3, 5, 3, SIDE, SIDE), ["left", "right", "left"]
    p = torch.stack([classifier.probabilities(frames[row], [tasks[row]] * 5) for row in range(3)])
    rewards, success = SuccessReward(path=str(file), threshold=0.8).score(frames[:, 0], frames[:, 1:], tasks)
    assert torch.equal(success, p[:, 1:] >= 0.8) and torch.equal(rewards, success.float())
    assert 0 < int(success.sum()) < success.numel()
    rewards, success = SuccessReward(path=str(file), progress=True).score(frames[:, 0], frames[:, 1:], tasks)
    assert torch.equal(success, p[:, 1:] >= 0.5)
    torch.testing.assert_close(rewards.sum(1), p[:, -1] - p[:, 0] + success.sum(1))


def test_files_and_tasks_that_are_not_known_are_refused(classifier, tmp_path) -> None:
    with pytest.raises(NotFoundError, match=r"no file .*absent.* which scripts/train_success_classifier.py writes"):
        SuccessReward(path=str(tmp_path / "absent"))
    (tmp_path / "text").write_text("nothing of this kind")
    with pytest.raises(NotFoundError, match="is no success classifier"):
        SuccessReward(path=str(tmp_path / "text"))
    with pytest.raises(InvalidValueError, match=r"knows the tasks 'left', 'right', and not 'lift'\. Did you mean"):
        classifier.numbers(["lift"])


# Environments that are scored


class Told:
    """Scores by what it was told, and records what it was given."""

    def __init__(self, success: Sequence[bool], reward: float) -> None:
        self.success, self.reward, self.given = torch.tensor(success), reward, (torch.empty(0), torch.empty(0))

    def score(self, before: Tensor, frames: Tensor, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        self.given = before, frames
        return torch.full((len(frames), 1), self.reward), self.success[: len(frames), None]


class Faulty(PixelReachEnvironment):
    """Entry 1 of every step is a fault."""

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        step = super().step(slots, actions)
        ended = torch.arange(len(slots)) == 1
        return replace(step, rewards=step.rewards * ~ended, truncated=step.truncated | ended, faults={1: "broken"})


def test_a_scored_environment_keeps_the_contract() -> None:
    check_environment(ScoredEnvironment(env=PixelReachEnvironment(), reward=DiscReward()), steps=14)


def test_images_decide_the_reward_and_the_end_of_an_episode() -> None:
    own = PixelReachEnvironment()
    reward = Told([False, True, False], 3.0)
    env = ScoredEnvironment(env=PixelReachEnvironment(), reward=reward, env_weight=0.5)
    first = env.reset([0, 1, 2], STARTS)["pixels"]
    own.reset([0, 1, 2], STARTS)
    actions = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step, plain = env.step([0, 1, 2], actions), own.step([0, 1, 2], actions)
    assert not plain.success.any(), "the environment itself goes on in this test"
    assert torch.equal(reward.given[0], first) and torch.equal(reward.given[1][:, 0], plain.observations["pixels"])
    assert torch.equal(step.rewards, 3.0 + 0.5 * plain.rewards)
    assert step.success.tolist() == [0, 1, 0] and step.terminated.tolist() == [False, True, False]
    with pytest.raises(AssertionError, match=r"slots \[1\] have no episode"):
        env.step([1], actions[:1])
    env.step([0, 2], actions[:2])
    assert torch.equal(reward.given[0], plain.observations["pixels"][[0, 2]])


def test_an_environment_that_fails_has_no_score() -> None:
    env = ScoredEnvironment(env=Faulty(), reward=Told([True, True], 3.0))
    env.reset([0, 1], STARTS[:2])
    step = env.step([0, 1], torch.zeros(2, 2))
    assert step.rewards.tolist() == [3.0, 0.0] and step.success.tolist() == [1, NOT_REPORTED]
    assert step.terminated.tolist() == [True, False] and step.truncated.tolist() == [False, True]


def test_images_of_another_size_are_refused_before_the_run(file) -> None:
    """The world model is of 24 x 24 pixels, the classifier of 16 x 16."""
    reward = f"{{_target_: unirl.envs.success.SuccessReward, path: {file}}}"
    says = "SuccessReward reads images of 16 x 16 pixels, and those of the environment have 24 x 24"
    with pytest.raises(InvalidValueError, match=says):
        preflight(load("embodied/world_model_pixel_reach_grpo", ["scale=toy", f"pipeline.env.reward={reward}"]))
    with pytest.raises(InvalidValueError, match=r"camera=front: pipeline.env.env shows pixels \[3, 24, 24\]"):
        ScoredEnvironment(env=PixelReachEnvironment(), reward=DiscReward(), camera="front")


def test_a_world_model_is_scored_by_a_classifier(tmp_path) -> None:
    made = SuccessClassifier((24, 24), ("",))
    made.write(tmp_path / "file")
    settings: dict[str, Any] = {
        "path": "toy-world",
        "dtype": "fp32",
        "max_sequence_length": 8,
        "num_inference_steps": 2,
    }
    env = WorldModelEnvironment(
        first=PixelReachEnvironment(), reward=SuccessReward(path=str(tmp_path / "file")), actions=2, chunk=4, **settings
    )
    env.reset([0, 1], STARTS[:2])
    step = env.step([0, 1], torch.zeros(2, 4, 2))
    assert torch.equal(step.rewards > 0, step.success) and step.success.dtype == torch.bool
