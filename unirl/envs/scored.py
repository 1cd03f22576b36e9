"""An environment whose rewards and success are read from its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.types.environments import (
    NOT_REPORTED,
    Environment,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    FrameReward,
    Observations,
)


@dataclass(frozen=True, eq=False)
class Seen:
    """The running episode of a slot: its newest image, and its task."""

    frame: Tensor  # [3, H, W] uint8
    task: str


class ScoredEnvironment:
    """Another environment with rewards and success from its images, as for a robot whose task no sensor measures.

    An episode also ends with the first image that shows success. What the environment itself says about success is not
    passed on, and its rewards only with `env_weight`.
    """

    def __init__(
        self, *, env: Environment, reward: FrameReward, camera: str = "pixels", env_weight: float = 0.0
    ) -> None:
        """
        Args:
            env: the environment. Its images are observations.
            reward: scores the images, such as `unirl.envs.success.SuccessReward`.
            camera: name of the observation with the images.
            env_weight: factor of the environment's own rewards, which are added to those of the images.

        Raises:
            InvalidValueError: 2004, there is no such image, or `reward` does not read images of its size.
        """
        self._env, self._reward, self._camera, self._env_weight = env, reward, camera, env_weight
        check_reads(reward, frame_size(env.spaces, camera, "pipeline.env.env"))
        self.spaces, self.is_keyed = env.spaces, env.is_keyed
        self._seen: dict[int, Seen] = {}

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """Start one episode in each slot. `unirl.types.environments.Environment.reset` has the contract."""
        observations = self._env.reset(slots, starts)
        for slot, start, frame in zip(slots, starts, observations[self._camera], strict=True):
            self._seen[slot] = Seen(frame, start.task)
        return observations

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        """Take one action in each slot. `unirl.types.environments.Environment.step` has the contract."""
        idle = [slot for slot in slots if slot not in self._seen]
        assert not idle, f"slots {idle} have no episode: it ended, or never began. Reset them first"
        seen = [self._seen[slot] for slot in slots]
        step = self._env.step(slots, actions)
        frames = step.observations[self._camera]
        rewards, success = self._reward.score(
            torch.stack([each.frame for each in seen]), frames[:, None], [each.task for each in seen]
        )
        works = torch.tensor([row not in step.faults for row in range(len(slots))])
        reached = success[:, 0] & works
        terminated = step.terminated | reached
        truncated = step.truncated & ~reached
        for slot, each, frame, over in zip(slots, seen, frames, (terminated | truncated).tolist(), strict=True):
            if over:
                del self._seen[slot]
            else:
                self._seen[slot] = replace(each, frame=frame)
        return replace(
            step,
            rewards=torch.where(works, rewards[:, 0] + self._env_weight * step.rewards, 0.0),
            terminated=terminated,
            truncated=truncated,
            success=torch.where(works, reached.to(torch.int8), NOT_REPORTED),
        )

    def render(self, slots: Sequence[int]) -> Tensor | None:
        """[B, 3, H, W] uint8 images of the slots."""
        return self._env.render(slots)

    def close(self) -> None:
        """Free the environment."""
        self._seen.clear()
        self._env.close()


def frame_size(spaces: EnvironmentSpaces, camera: str, where: str) -> tuple[int, int]:
    """Height and width of the images of a camera. Raises InvalidValueError (2004) if there are none.

    Args:
        where: the place of the environment in the recipe.
    """
    shape = spaces.observations.get(camera, ())
    if len(shape) != 3 or shape[0] != 3:
        shown = ", ".join(f"{key} {list(size)}" for key, size in spaces.observations.items())
        raise InvalidValueError(f"pipeline.env.camera={camera}: {where} shows {shown}. Name an image of 3 channels")
    return shape[1], shape[2]


def check_reads(reward: FrameReward, size: tuple[int, int]) -> None:
    """Raises InvalidValueError (2004) if a reward does not read images of this height and width."""
    read: tuple[int, int] | None = getattr(reward, "size", None)
    if read is not None and tuple(read) != size:
        raise InvalidValueError(
            f"pipeline.env.reward: {type(reward).__name__} reads images of {read[0]} x {read[1]} pixels, and those of "
            f"the environment have {size[0]} x {size[1]}. Train it on images of this size, or show others"
        )
