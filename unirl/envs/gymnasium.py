"""Environments of Gymnasium, by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import (
    DependencyError,
    EpisodeError,
    InvalidValueError,
    UnsupportedEnvironmentError,
    did_you_mean,
)
from unirl.envs.drawing import WAYS_TO_DRAW, choose_back_end
from unirl.envs.pool import WorkerPool
from unirl.envs.slots import DrawingError, Slots, Source
from unirl.envs.spaces import Array, Arrays, DiscreteCodec
from unirl.tracking.streams import say
from unirl.types.environments import (
    ContinuousActions,
    DiscreteActions,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    Observations,
)

if TYPE_CHECKING:
    import gymnasium


Render = Literal["auto"] | bool
"""Draw images of episodes: always, never, or `auto`, if this machine can."""


class GymnasiumEnvironment:
    """Slots with environments of `gymnasium.make(id)`, in this process or in worker processes.

    Observations that are a Box or Discrete space have the key `state`; those of a Dict space have their own keys, and
    parts of nested Dict spaces the keys on the way to them, joined by dots: `desired_goal.microwave`. A Dict action of
    Boxes becomes one vector, its parts in the order of the space.
    Numbers become float32, a Discrete observation becomes one-hot, and uint8 images stay uint8, as [C, H, W].
    Continuous actions in [-1, 1] are scaled to the bounds of the action space. `reset` seeds the environment with the
    seed of the start, and passes on its options, and as `task` the words of its task, if it has one. `info["success"]`
    or `info["is_success"]` reports success; without either, no success is reported.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, object] | None = None,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        observation_keys: tuple[str, ...] = (),
        frame_stack: Annotated[int, msgspec.Meta(ge=1)] = 1,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
        render: Render = False,
        render_size: Annotated[int, msgspec.Meta(ge=16)] | None = None,
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            id: the id of a registered environment; `module:id` imports the module that registers it.
            kwargs: further arguments of the environment.
            workers: number of processes that share the slots. 0: all environments are in this process, where one that
                hangs cannot be interrupted.
            max_steps: number of steps after which an episode is truncated. null: the limit that the id is registered
                with.
            observation_keys: keys of a Dict observation that the policy sees. Empty: all of them.
            frame_stack: number of newest observations that are joined along their first axis.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.
            render: draw images of the episodes, in addition to observations. auto: if this machine can.
            render_size: pixels of both sides of an image, of an environment that takes `width` and `height`. null: its
                own.
            cameras: height and width of an image by the name of a camera of a MuJoCo environment. The images are
                observations with the names of their cameras, beside the environment's own. null: none.

        Raises:
            DependencyError: 3001, a library is missing, or `render` is true and this machine cannot draw.
            InvalidValueError: 2004, an unknown id, or arguments that it does not take.
            IncompatibleError: 2020, a space that a policy cannot read or act in.
        """
        need("gymnasium", by=f"{type(self).__name__} (id={id})", extra="embodied")
        source = Source(
            id=id,
            kwargs=dict(kwargs or {}),
            max_steps=max_steps,
            observation_keys=tuple(observation_keys),
            frame_stack=frame_stack,
            render=render is not False,
            render_size=render_size,
            cameras=dict(cameras or {}),
        )
        self._open(source, workers, timeout_s, render)

    def _open(self, source: Source, workers: int, timeout_s: float, render: Render = False) -> None:
        """Make one environment, and learn its spaces from it."""
        first = made(source)
        self._render: Render = render
        self._source = source
        slots = Slots(source, first)
        if render is True:
            _check_drawing(slots, source)
        codec = slots.codec
        self._slots: Slots | WorkerPool = slots
        if workers:
            slots.close()
            self._slots = WorkerPool(source, slots.readers, codec, workers, timeout_s)
        self._running: set[int] = set()
        actions = DiscreteActions(codec.count) if isinstance(codec, DiscreteCodec) else ContinuousActions(codec.size)
        self.spaces = EnvironmentSpaces(
            observations={key: reader.shape for key, reader in slots.readers.items()},
            actions=actions,
            most_steps=source.max_steps or (first.spec.max_episode_steps if first.spec else None),
        )
        self.is_keyed = not (first.spec and first.spec.nondeterministic)

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """Start one episode in each slot. `unirl.types.environments.Environment.reset` has the contract."""
        if self._render is not False and not self._running:
            choose_back_end()  # before any worker starts
        observations, failures = self._slots.reset(
            slots, [start.seed for start in starts], [options_of(start) for start in starts]
        )
        for row, reason in failures.items():
            raise EpisodeError(
                f"environment {self._source.id} in slot {slots[row]} cannot start an episode "
                f"(seed={starts[row].seed}), even after it was made anew: {reason}"
            )
        self._running.update(slots)
        return as_tensors(observations)

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        """Take one action in each slot. `unirl.types.environments.Environment.step` has the contract."""
        assert self._running.issuperset(slots), (
            f"slots {sorted(set(slots) - self._running)} have no episode: it ended, or never began. Reset them first"
        )
        actions = actions.long() if isinstance(self.spaces.actions, DiscreteActions) else actions.float()
        result = self._slots.step(slots, actions.numpy())
        terminated, truncated = result.ends
        ended = terminated | truncated
        if ended.any():
            self._running.difference_update([slots[row] for row in np.flatnonzero(ended).tolist()])
        return EnvironmentStep(
            observations=as_tensors(result.observations),
            rewards=torch.from_numpy(result.rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            success=torch.from_numpy(result.success),
            faults=result.faults,
        )

    def render(self, slots: Sequence[int]) -> Tensor | None:
        """[B, 3, H, W] uint8 images of the slots. None unless `render` is set, and with auto also if nothing can draw.

        Raises:
            DependencyError: 3001, this machine cannot draw, and `render` is true.
        """
        if self._render is False:
            return None
        try:
            return torch.from_numpy(self._slots.render(slots))
        except DrawingError as error:
            if self._render is True:
                raise _cannot_draw(self._source, error) from error
            problem = _no_drawing(self._source, error)
        say(f"unirl: no videos of episodes: {problem}")
        self._render = False
        return None

    def close(self) -> None:
        """Close all environments."""
        self._running.clear()
        self._slots.close()


def _check_drawing(slots: Slots, source: Source) -> None:
    """Draw the start of an episode. An environment that cannot start one is left to the run, whose reset says why."""
    choose_back_end()
    _, failures = slots.reset([0], [0], [{}])
    if not failures:
        try:
            slots.render([0])
        except DrawingError as error:
            slots.close()
            raise _cannot_draw(source, error) from error


def _no_drawing(source: Source, error: DrawingError) -> str:
    return f"environment {source.id} cannot draw itself here ({error}). {WAYS_TO_DRAW}"


def _cannot_draw(source: Source, error: DrawingError) -> DependencyError:
    return DependencyError(f"{_no_drawing(source, error)}, or set pipeline.env.render=auto, which goes on without")


def options_of(start: EpisodeStart) -> Mapping[str, object]:
    """The options of a reset: those of the start, and its task in words as `task` if it has one."""
    return {**start.options, "task": start.task} if start.task else start.options


def as_tensors(arrays: Arrays) -> Observations:
    """The arrays as tensors, without a copy."""
    return {key: _tensor(values) for key, values in arrays.items()}


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(values)


def made(source: Source) -> gymnasium.Env[Any, Any]:
    """An environment of the source, or an error that says what to change in the recipe."""
    import gymnasium

    try:
        return source.make()
    except gymnasium.error.DependencyNotInstalled as error:
        raise DependencyError(f"environment {source.id}: {error}. Or: pip install 'unirl[embodied]'") from error
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"environment {source.id} needs a module that is not installed here ({error}): install its package, or "
            "pip install 'unirl[embodied]'"
        ) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise InvalidValueError(
            f"pipeline.env.id={source.id} is no environment that Gymnasium knows."
            f"{did_you_mean(source.id, gymnasium.registry)} An environment of a package of "
            "yours is named `module:id`, where the module registers it"
        ) from error
    except gymnasium.error.Error as error:
        raise UnsupportedEnvironmentError(f"environment {source.id} cannot be made here: {error}") from error
    except TypeError as error:
        raise InvalidValueError(f"environment {source.id} does not take kwargs={source.kwargs}: {error}") from error
