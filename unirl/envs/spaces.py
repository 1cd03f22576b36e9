"""Gymnasium's spaces as ours: how an observation becomes arrays, and an action becomes one of the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unirl.config.errors import IncompatibleError, InvalidValueError, did_you_mean

if TYPE_CHECKING:
    import gymnasium

Array = NDArray[Any]
Arrays = dict[str, Array]
STATE = "state"
"""The key of an observation that is one array; it equals `unirl.types.environments.STATE`, whose module needs torch."""


LARGEST_BOUND = 1e30
"""Bounds beyond this stand for no bounds; float32 ends at 3.4e38."""


@dataclass(frozen=True)
class Reader:
    """One part of an observation: its shape and type for the policy, and how it is written into an array."""

    shape: tuple[int, ...]
    pixels: bool
    """True: uint8, kept as it is. False: float32."""
    write: Callable[[Any, Array], None]
    """Writes a value of the environment into an array of `shape`."""

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint8 if self.pixels else np.float32


def readers_of(space: gymnasium.Space[Any], keys: Sequence[str], what: str) -> tuple[dict[str, Reader], bool]:
    """The readers of an observation space by key, and True if its observations are dictionaries.

    Args:
        keys: the parts to read, of a dictionary. Empty: all.
        what: the environment, for messages.

    Raises:
        IncompatibleError: 2020, a space that no policy here can read.
        InvalidValueError: 2004, a key that the space does not have.
    """
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        if keys and tuple(keys) != (STATE,):
            raise InvalidValueError(
                f"observation_keys={list(keys)}: the observation of {what} is one array, whose key is '{STATE}'. "
                "Leave out observation_keys"
            )
        return {STATE: _reader(space, f"the observation of {what}")}, False
    for key in keys:
        if key not in space.spaces:
            raise InvalidValueError(
                f"observation_keys: {what} observes {', '.join(space.spaces)}, not '{key}'."
                + did_you_mean(key, space.spaces)
            )
    parts = {key: space.spaces[key] for key in keys or space.spaces}
    return {key: _reader(part, f"observation '{key}' of {what}") for key, part in parts.items()}, True


def _reader(space: gymnasium.Space[Any], what: str) -> Reader:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return _one_hot(int(space.n), int(space.start))
    if not isinstance(space, spaces.Box):
        raise IncompatibleError(
            f"{what} is {space}. A policy reads Box, Discrete, or a Dict of these: wrap the environment in "
            "gymnasium.wrappers.FlattenObservation, or name the readable parts in observation_keys"
        )
    if space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return Reader(space.shape or (1,), False, write_numbers)
    if len(space.shape) == 2:
        return Reader((1, *space.shape), True, write_numbers)
    height, width, channels = space.shape
    if channels > height:  # [C, H, W] already
        return Reader(space.shape, True, write_numbers)
    return Reader((channels, height, width), True, _write_channels_last)


def write_numbers(value: Any, row: Array) -> None:
    row[...] = value


def _write_channels_last(value: Any, row: Array) -> None:
    row[...] = value.transpose(2, 0, 1)


def _one_hot(count: int, start: int) -> Reader:
    def write(value: Any, row: Array) -> None:
        row[...] = 0.0
        row[int(value) - start] = 1.0

    return Reader((count,), False, write)


@dataclass(frozen=True)
class DiscreteCodec:
    """Actions 0 to count - 1 as those of a Discrete space."""

    count: int
    start: int

    def from_bytes(self, data: bytes) -> Array:
        """[B] int64."""
        return np.frombuffer(data, np.int64)

    def decode(self, actions: Array) -> list[int]:
        """B actions of the environment. Numbers outside are clipped."""
        bounded: Array = np.minimum(np.maximum(actions, 0), self.count - 1)  # np.clip takes several times as long
        return (bounded + self.start).tolist()  # Discrete.contains is faster for int than for np.int64


@dataclass(frozen=True)
class ContinuousCodec:
    """Actions in [-1, 1] as those of a Box space with finite bounds."""

    low: Array  # [A]
    high: Array  # [A]
    shape: tuple[int, ...]
    center: Array = field(init=False)
    half: Array = field(init=False)
    is_unit: bool = field(init=False)
    """All bounds are -1 and 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", (self.high + self.low) / 2)
        object.__setattr__(self, "half", (self.high - self.low) / 2)
        object.__setattr__(self, "is_unit", bool((self.low == -1).all() and (self.high == 1).all()))

    @property
    def size(self) -> int:
        return self.low.size

    def from_bytes(self, data: bytes) -> Array:
        """[B, A] float32."""
        return np.frombuffer(data, np.float32).reshape(-1, self.size)

    def decode(self, actions: Array) -> Array:
        """[B, *shape] actions of the environment: -1 is `low`, 1 is `high`. Numbers outside are clipped."""
        bounded: Array = np.minimum(np.maximum(actions, -1.0), 1.0)
        if not self.is_unit:  # bounds of -1 and 1 leave the numbers as they are, to the bit
            scaled = self.center + self.half * bounded
            bounded = np.minimum(np.maximum(scaled, self.low), self.high)  # rounding may pass a bound
        return bounded.astype(self.low.dtype, copy=False).reshape(len(actions), *self.shape)


Codec = DiscreteCodec | ContinuousCodec


def codec_of(space: gymnasium.Space[Any], what: str) -> Codec:
    """How actions of a policy become those of an action space.

    Raises:
        IncompatibleError: 2020, a space that no policy here can act in.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return DiscreteCodec(int(space.n), int(space.start))
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise IncompatibleError(
            f"the action of {what} is {space}. A policy acts in Box (of floats), a Dict of these, or Discrete: "
            "wrap the environment in gymnasium.wrappers.TransformAction, with an action space of these"
        )
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    if np.abs([low, high]).max(initial=0.0) > LARGEST_BOUND:
        raise IncompatibleError(
            f"the action of {what} is {space}, which has no finite bounds, so that [-1, 1] cannot be scaled to it: "
            "wrap the environment in gymnasium.wrappers.TransformAction, with an action space that has bounds"
        )
    return ContinuousCodec(low.copy(), high.copy(), space.shape)


def empty_rows(readers: Mapping[str, Reader], count: int) -> Arrays:
    """One array [count, *shape] for each key, all zero."""
    return {key: np.zeros((count, *reader.shape), reader.dtype) for key, reader in readers.items()}
