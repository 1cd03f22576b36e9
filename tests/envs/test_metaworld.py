"""Meta-World behind our contract: keyed starts, and its own experts succeed."""

from __future__ import annotations

import pytest
import torch

from unirl.config.errors import InvalidValueError
from unirl.envs.metaworld import MetaWorldEnvironment, MetaWorldExpert
from unirl.types.environments import EpisodeStart

GOAL = slice(36, 39)


def starts(*seeds: int) -> list[EpisodeStart]:
    return [EpisodeStart(seed=seed) for seed in seeds]


def test_the_seed_decides_the_goal_in_any_slot() -> None:
    env = MetaWorldEnvironment(task="reach-v3")
    first = env.reset([0, 1], starts(1, 2))["state"]
    again = env.reset([2, 0], starts(2, 1))["state"]
    assert torch.equal(first[0], again[1]) and torch.equal(first[1], again[0])
    assert not torch.equal(first[0, GOAL], first[1, GOAL])


@pytest.mark.parametrize("task", ["reach-v3", "push-v3"])
def test_the_scripted_expert_succeeds_and_the_limit_truncates(task: str) -> None:
    env, expert = MetaWorldEnvironment(task=task, max_steps=120), MetaWorldExpert(task=task)
    seen, succeeded = env.reset([0], starts(3)), False
    for _ in range(120):
        step = env.step([0], expert.label(seen))
        seen, succeeded = step.observations, succeeded or bool(step.success > 0)
    assert succeeded and bool(step.truncated) and not bool(step.terminated)


def test_a_task_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"pipeline.expert.task=reach-v9 .* Did you mean 'reach-v3'"):
        MetaWorldExpert(task="reach-v9")
    with pytest.raises(InvalidValueError, match=r"task=reach-v9 is no task of Meta-World\. Did you mean 'reach-v3'"):
        MetaWorldEnvironment(task="reach-v9")
