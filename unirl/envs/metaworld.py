"""Tasks of Meta-World, one at a time (MT1): `reach-v3`, `push-v3` and 48 others. https://github.com/Farama-Foundation/Metaworld"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import InvalidValueError, did_you_mean
from unirl.envs.gymnasium import GymnasiumEnvironment, Render
from unirl.envs.slots import Source
from unirl.types.environments import STATE, Observations

if TYPE_CHECKING:
    import gymnasium

HORIZON = 500
"""Meta-World itself truncates an episode after this many steps."""


class MetaWorldEnvironment(GymnasiumEnvironment):
    """Slots with one task of Meta-World: a Sawyer arm, state [39], actions [4]; the goal is part of the state.

    The seed of a start decides the positions of goal and object. `info["success"]` reports success, at every step where
    the task is solved; an episode goes on after that.
    """

    toy: ClassVar[Mapping[str, object]] = {"render": False}

    def __init__(
        self,
        *,
        task: str,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1), msgspec.Meta(le=HORIZON)] = HORIZON,
        frame_stack: Annotated[int, msgspec.Meta(ge=1)] = 1,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
        render: Render = False,
        render_size: Annotated[int, msgspec.Meta(ge=16)] | None = None,
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            task: name of the task, such as `reach-v3`.
            workers: number of processes that share the slots. 0: all environments are in this process.
            max_steps: number of steps after which an episode is truncated.
            frame_stack: number of newest observations that are joined along their first axis.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.
            render: draw images of the episodes. auto: if this machine can.
            render_size: pixels of both sides of an image. null: 480.
            cameras: height and width of an image by the name of a camera, such as `corner` or `gripperPOV`. The images
                are observations with the names of their cameras, beside `state`. null: none.

        Raises:
            DependencyError: 3001, metaworld is not installed.
            InvalidValueError: 2004, an unknown task.
        """
        need("metaworld", by=f"{type(self).__name__} (task={task})", extra="metaworld")
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        if task not in ALL_V3_ENVIRONMENTS:
            raise InvalidValueError(
                f"pipeline.env.task={task} is no task of Meta-World.{did_you_mean(task, ALL_V3_ENVIRONMENTS)} "
                f"It has {', '.join(sorted(ALL_V3_ENVIRONMENTS))}"
            )
        source = Source(
            id=task,
            maker="unirl.envs.metaworld:make_task",
            max_steps=max_steps,
            frame_stack=frame_stack,
            render=render is not False,
            render_size=render_size,
            cameras=dict(cameras or {}),
        )
        self._open(source, workers, timeout_s, render)


def make_task(task: str, *, render_mode: str | None, **size: int) -> gymnasium.Env[Any, Any]:
    """A task whose `reset` obeys its seed.

    Args:
        size: `width` and `height` of images.
    """
    import gymnasium
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    class SeededTask(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(
            self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            if seed is not None:
                self.unwrapped.seed(seed % 2**32)
            return self.env.reset()

        def render(self) -> Any:
            return self.env.render()[::-1, ::-1]  # the cameras in the corners hang upside down

    environment = ALL_V3_ENVIRONMENTS[task](render_mode=render_mode, camera_name="corner2", **size)
    # As the tasks of MT1: positions are drawn at each reset, here from the seeded generator, and the goal is visible.
    environment._set_task_called = True
    environment._freeze_rand_vec = False
    environment.seeded_rand_vec = True
    environment._partially_observable = False
    # It is cached with a goal of zeros, to which every observation after the first would be clipped.
    del environment.sawyer_observation_space
    return SeededTask(environment)


class MetaWorldExpert:
    """The scripted policy of a task of Meta-World. It reads the observation `state`."""

    def __init__(self, *, task: str) -> None:
        """
        Args:
            task: name of the task, such as `reach-v3`.

        Raises:
            DependencyError: 3001, metaworld is not installed.
            InvalidValueError: 2004, an unknown task.
        """
        need("metaworld", by=f"{type(self).__name__} (task={task})", extra="metaworld")
        from metaworld.policies import ENV_POLICY_MAP

        kinds: Mapping[str, Callable[[], Any]] = ENV_POLICY_MAP
        if task not in kinds:
            raise InvalidValueError(
                f"pipeline.expert.task={task} is no task for which Meta-World has a policy.{did_you_mean(task, kinds)}"
            )
        self.policy = kinds[task]()

    def label(self, observations: Observations) -> Tensor:
        """[B, 4] the actions of the scripted policy, clipped to [-1, 1]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the environment clips its actions
            actions = [self.policy.get_action(state) for state in observations[STATE].double().numpy()]
        return torch.as_tensor(np.stack(actions)).float().clamp(-1, 1)
