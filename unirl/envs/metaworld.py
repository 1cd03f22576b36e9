"""Tasks of Meta-World: a Sawyer arm in MuJoCo, with success as the environment reports it (arXiv:1910.10897)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import InvalidValueError, did_you_mean
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.slots import Source

if TYPE_CHECKING:
    import gymnasium

MOST_STEPS = 500
"""Steps of an episode of Meta-World."""


class MetaWorldEnvironment(GymnasiumEnvironment):
    """Slots with one task. The seed of a start decides the places of the goal and of the objects.

    The observation `state` [39] has the hand, the objects and the goal; an action [4] moves the hand and the gripper.
    An episode does not end at success.
    """

    def __init__(
        self,
        *,
        task: str,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = MOST_STEPS,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
        render: bool = False,
    ) -> None:
        """
        Args:
            task: such as `reach-v3`.
            workers: number of processes that share the slots; 0: all are in this process.
            max_steps: number of steps after which an episode is truncated.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.
            render: draw pictures of the episodes. MuJoCo needs a renderer for that, such as MUJOCO_GL=egl.

        Raises:
            DependencyError: 3001, metaworld is not installed.
            InvalidValueError: 2004, an unknown task.
        """
        need("metaworld", by=f"{type(self).__name__} (task={task})", extra="metaworld")
        known = tasks()
        if task not in known:
            raise InvalidValueError(f"task={task} is no task of Meta-World.{did_you_mean(task, list(known))}")
        source = Source(id=task, maker=f"{__name__}:make", max_steps=max_steps, render=render)
        self._open(source, workers, timeout_s)


def tasks() -> Mapping[str, type[gymnasium.Env[Any, Any]]]:
    """The classes of all tasks by name."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    known: Mapping[str, type[gymnasium.Env[Any, Any]]] = ALL_V3_ENVIRONMENTS
    return known


def make(task: str, *, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """One environment of a task, whose `reset(seed=...)` decides everything about the episode."""
    import gymnasium

    class Keyed(gymnasium.Wrapper[Any, Any, Any, Any]):
        """Meta-World draws the start of an episode by a generator of its own, which `reset` does not seed."""

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            if seed is not None:
                inner: Any = self.env.unwrapped
                inner.seed(seed % 2**32)
            return self.env.reset()

    inner: Any = tasks()[task](render_mode=render_mode)  # type: ignore[call-arg]
    # As metaworld's own class of tasks with an observable goal does it.
    inner._freeze_rand_vec, inner._set_task_called, inner._partially_observable = False, True, False
    inner.seeded_rand_vec = True
    del inner.sawyer_observation_space  # it is cached, and depends on what was just set
    return Keyed(inner)


def expert_of(task: str) -> Callable[[Tensor], Tensor]:
    """Meta-World's scripted policy of a task: an action [4] for an observation [39]."""
    from metaworld.policies import ENV_POLICY_MAP

    kinds: Mapping[str, Callable[[], Any]] = ENV_POLICY_MAP
    policy = kinds[task]()
    return lambda state: torch.as_tensor(policy.get_action(state.double().numpy())).float()
