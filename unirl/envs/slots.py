"""Environments of Gymnasium in numbered slots of one process. A fault of one of them leaves the others as they are.

This module needs numpy and Gymnasium alone, so that a worker process starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from unirl.envs.cameras import with_cameras
from unirl.envs.flat import with_flat_spaces
from unirl.envs.spaces import STATE, Array, Arrays, Codec, Reader, codec_of, empty_rows, readers_of, write_numbers

if TYPE_CHECKING:
    import gymnasium

NOT_REPORTED = -1
"""`unirl.types.environments.NOT_REPORTED`, without the import of torch."""


class DrawingError(Exception):
    """An environment cannot draw itself here."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to make an environment, in this process or in another one."""

    id: str
    kwargs: dict[str, Any] = {}
    maker: str = "gymnasium:make"
    """`module:function`, which is called with the id, `render_mode` and `kwargs`."""
    max_steps: int | None = None
    observation_keys: tuple[str, ...] = ()
    frame_stack: int = 1
    render: bool = False
    render_size: int | None = None
    cameras: dict[str, tuple[int, int]] = {}
    """Height and width of the images of a MuJoCo camera, by its name."""

    def make(self) -> gymnasium.Env[Any, Any]:
        """A new environment."""
        made = with_flat_spaces(self._made())
        return with_cameras(made, self.cameras) if self.cameras else made

    def _made(self) -> gymnasium.Env[Any, Any]:
        from gymnasium.wrappers import TimeLimit

        module, _, function = self.maker.partition(":")
        mode = "rgb_array" if self.render else None
        size = {} if self.render_size is None else {"width": self.render_size, "height": self.render_size}
        if self.maker == "gymnasium:make":
            limit = {} if self.max_steps is None else {"max_episode_steps": self.max_steps}
            # Gymnasium's checker wraps each step; `readers_of`, `codec_of` and `Slots` check what matters here.
            plain = {"disable_env_checker": True} | limit
            return import_module(module).make(self.id, render_mode=mode, **plain | size | self.kwargs)
        made = getattr(import_module(module), function)(self.id, render_mode=mode, **size | self.kwargs)
        return made if self.max_steps is None else TimeLimit(made, self.max_steps)


@dataclass
class StepArrays:
    """`unirl.types.environments.EnvironmentStep` as arrays."""

    observations: Arrays
    rewards: Array  # [B] float32
    ends: Array  # [2, B] bool: terminated, truncated
    success: Array  # [B] int8: 1 success, 0 none, NOT_REPORTED
    faults: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, readers: Mapping[str, Reader], count: int) -> StepArrays:
        """A step of `count` environments with nothing but zeros in it, and no success reported."""
        success = np.empty(count, np.int8)
        success.fill(NOT_REPORTED)  # np.full takes several times as long
        return cls(empty_rows(readers, count), np.zeros(count, np.float32), np.zeros((2, count), bool), success)

    def set_fault(self, row: int, reason: str) -> None:
        """Row `row` is an environment that failed: its episode is cut off here, without reward."""
        for values in self.observations.values():
            values[row] = 0
        self.rewards[row] = 0.0
        self.ends[:, row] = False, True
        self.success[row] = NOT_REPORTED
        self.faults[row] = reason


class Slots:
    """The environments of a source by slot. One is made when its slot is first reset, or reset after a fault."""

    def __init__(self, source: Source, first: gymnasium.Env[Any, Any]) -> None:
        """`first` is an environment of the source; the first slot gets it."""
        self._source = source
        self._spare: gymnasium.Env[Any, Any] | None = first
        single, self._by_key = readers_of(first.observation_space, source.observation_keys, source.id)
        self.codec: Codec = codec_of(first.action_space, source.id)
        self._single = single
        self.readers = {key: stacked(reader, source.frame_stack) for key, reader in single.items()}
        self._is_plain = not self._by_key and source.frame_stack == 1 and self._single[STATE].write is write_numbers
        self._numbers = [key for key, reader in single.items() if not reader.pixels]
        self._environments: dict[int, gymnasium.Env[Any, Any]] = {}
        self._frames: dict[int, Arrays] = {}
        """The newest stacked observation of each slot, if frames are stacked."""

    def reset(
        self, slots: Sequence[int], seeds: Sequence[int], options: Sequence[Mapping[str, object]]
    ) -> tuple[Arrays, dict[int, str]]:
        """The first observations, and the reasons by row why an environment cannot start, even made anew."""
        observations = empty_rows(self.readers, len(slots))
        failures: dict[int, str] = {}
        for row, slot in enumerate(slots):
            for _ in range(2):
                reason = self._start(slot, row, seeds[row], options[row], observations)
                if reason is None:
                    failures.pop(row, None)
                    break
                failures[row] = reason
                self._drop(slot)
        return observations, failures

    def _start(self, slot: int, row: int, seed: int, options: Mapping[str, object], observations: Arrays) -> str | None:
        """Start an episode. Returns the reason if that fails."""
        try:
            if slot not in self._environments:
                self._environments[slot] = self._source.make() if self._spare is None else self._spare
                self._spare = None
            first, _ = self._environments[slot].reset(seed=seed, options=dict(options) or None)
            self._frames.pop(slot, None)
            self._read(first, slot, row, observations)
        except Exception as error:  # an environment is foreign code, which may raise anything
            return reason_of(error)
        return not_finite(observations, row)

    def step(self, slots: Sequence[int], actions: Array) -> StepArrays:
        """One action in each slot: [B] int64, or [B, A] float32."""
        result = StepArrays.empty(self.readers, len(slots))
        environments, read, observations = self._environments, self._read, result.observations
        rewards = result.rewards
        (terminated, truncated), success = result.ends, result.success
        plain = observations[STATE] if self._is_plain else None  # most environments; a call less for each step
        for row, (slot, action) in enumerate(zip(slots, self.codec.decode(actions), strict=True)):
            try:
                observation, rewards[row], is_terminated, is_truncated, info = environments[slot].step(action)
                if plain is None:
                    read(observation, slot, row, observations)
                else:
                    plain[row] = observation
                if is_terminated:
                    terminated[row] = True
                if is_truncated:
                    truncated[row] = True
                if info:
                    success[row] = success_in(info)
            except Exception as error:  # an environment is foreign code, which may raise anything
                result.set_fault(row, reason_of(error))
                self._drop(slot)
        self._find_values_that_are_not_finite(slots, actions, result)
        return result

    def _find_values_that_are_not_finite(self, slots: Sequence[int], actions: Array, result: StepArrays) -> None:
        columns = [result.rewards, *[result.observations[key] for key in self._numbers]]
        if all(np.isfinite(values).all() for values in columns):
            return
        for row, slot in enumerate(slots):
            if not np.isfinite(result.rewards[row]):
                reason = f"the reward is {result.rewards[row]}"
            else:
                reason = not_finite(result.observations, row) or ""
            if reason:
                given = "" if np.isfinite(actions[row]).all() else ", after an action that is not finite"
                result.set_fault(row, reason + given)
                self._drop(slot)

    def _read(self, observation: Any, slot: int, row: int, into: Arrays) -> None:
        """Write an observation into row `row`, below the frames before it if frames are stacked."""
        frames = self._source.frame_stack
        for key, reader in self._single.items():
            value, target = observation[key] if self._by_key else observation, into[key][row]
            if frames == 1:
                reader.write(value, target)
                continue
            length = reader.shape[0]
            before = self._frames.get(slot, {}).get(key)
            reader.write(value, target[-length:])
            if before is None:  # the first frame of an episode stands for those before it
                target[:-length] = np.concatenate([target[-length:]] * (frames - 1))
            else:
                target[:-length] = before[length:]
        if frames > 1:
            self._frames[slot] = {key: into[key][row] for key in self._single}

    def render(self, slots: Sequence[int]) -> Array:
        """[B, 3, H, W] uint8 images of the slots. Raises DrawingError, with the reason in one line."""
        try:
            images = [np.asarray(self._environments[slot].render(), np.uint8) for slot in slots]
        except Exception as error:  # an environment is foreign code, which may raise anything
            raise DrawingError(reason_of(error)) from error
        return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))

    def close(self) -> None:
        """Close every environment."""
        for slot in list(self._environments):
            self._drop(slot)
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _drop(self, slot: int) -> None:
        self._frames.pop(slot, None)
        environment = self._environments.pop(slot, None)
        if environment is not None:
            with suppress(Exception):  # it may be why it is dropped
                environment.close()


def success_in(info: Mapping[str, Any]) -> int:
    """1 if `success` or `is_success` in `info` is true, 0 if it is false, NOT_REPORTED without either."""
    reported = info.get("success", info.get("is_success"))
    return NOT_REPORTED if reported is None else int(np.any(reported))


def stacked(reader: Reader, frames: int) -> Reader:
    """The reader of `frames` observations, one below the other along the first axis."""
    return Reader((frames * reader.shape[0], *reader.shape[1:]), reader.pixels, reader.write)


def reason_of(error: Exception) -> str:
    """An exception of an environment in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def not_finite(observations: Mapping[str, Array], row: int) -> str | None:
    """The reason if an observation has numbers that are not finite."""
    for key, values in observations.items():
        finite = np.isfinite(values[row])
        if not finite.all():
            return f"observation '{key}' has {int((~finite).sum())} of {finite.size} numbers that are not finite"
    return None
