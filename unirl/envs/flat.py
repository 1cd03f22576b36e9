"""Nested dictionaries of Gymnasium's spaces as flat ones, for simulators that group their observations or actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unirl.envs.spaces import Array

if TYPE_CHECKING:
    import gymnasium

Path = tuple[str, ...]


def with_flat_spaces(environment: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The environment with flat observations and actions, or itself if its spaces are flat already.

    A part of a nested Dict observation gets the keys on the way to it, joined by dots: `desired_goal.microwave`. A Dict
    action whose parts are Boxes of floats becomes one Box [A]: the parts in the order of the space, one after another.

    Raises:
        gymnasium.error.Error: two parts of the observation get the same key.
    """
    import gymnasium
    from gymnasium import spaces

    observed, acted = environment.observation_space, environment.action_space
    is_nested = isinstance(observed, spaces.Dict) and any(isinstance(part, spaces.Dict) for part in observed.values())
    boxes = _boxes(acted)
    if not is_nested and not boxes:
        return environment
    paths: dict[str, Path] = {}
    parts: dict[str, gymnasium.Space[Any]] = {}
    if is_nested:
        for path, part in leaves(observed):
            key = ".".join(path)
            if key in paths:
                raise gymnasium.error.Error(f"two parts of its observation have the key {key!r}: {paths[key]}, {path}")
            paths[key], parts[key] = path, part

    class FlatSpaces(gymnasium.Wrapper[Any, Any, Any, Any]):
        """Flattens each observation, and cuts each action into its parts."""

        def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
            observation, info = self.env.reset(**arguments)
            return self._seen(observation), info

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            given = parts_of(action, boxes) if boxes else action
            observation, reward, terminated, truncated, info = self.env.step(given)
            return self._seen(observation), reward, terminated, truncated, info

        def _seen(self, observation: Any) -> Any:
            return {key: at(observation, path) for key, path in paths.items()} if paths else observation

    wrapped = FlatSpaces(environment)
    if is_nested:
        wrapped.observation_space = spaces.Dict(parts)
    if boxes:
        low = np.concatenate([box.low.reshape(-1) for box in boxes.values()])
        high = np.concatenate([box.high.reshape(-1) for box in boxes.values()])
        wrapped.action_space = spaces.Box(low, high, dtype=low.dtype.type)
    return wrapped


def _boxes(space: gymnasium.Space[Any]) -> dict[str, gymnasium.spaces.Box]:
    """The parts of a Dict of Boxes of floats by key. Empty for any other space."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        return {}
    boxes = {
        key: part
        for key, part in space.items()
        if isinstance(part, spaces.Box) and np.issubdtype(part.dtype, np.floating)
    }
    return boxes if len(boxes) == len(space) else {}


def leaves(space: gymnasium.Space[Any], path: Path = ()) -> Iterator[tuple[Path, gymnasium.Space[Any]]]:
    """The parts of a nested Dict that are no Dict themselves, each with the keys on the way to it."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        yield path, space
        return
    for key, part in space.items():
        yield from leaves(part, (*path, key))


def at(observation: Any, path: Path) -> Any:
    """The value at the end of a path of keys."""
    for key in path:
        observation = observation[key]
    return observation


def parts_of(action: Array, boxes: Mapping[str, gymnasium.spaces.Box]) -> dict[str, Array]:
    """An action [A] as the parts of a Dict action, each with its shape and type."""
    parts: dict[str, Array] = {}
    start = 0
    for key, box in boxes.items():
        size = int(np.prod(box.shape))
        parts[key] = action[start : start + size].reshape(box.shape).astype(box.dtype, copy=False)
        start += size
    return parts
