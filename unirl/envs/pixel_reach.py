"""A toy environment of images and instructions: a hand in the plane moves to the target that the task names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import msgspec
import numpy as np
import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.types.environments import (
    STATE,
    ContinuousActions,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    Observations,
)

if TYPE_CHECKING:
    import gymnasium

PIXELS = "pixels"
COLOURS = {"red": 0, "blue": 2}
"""The targets by name, and the channel of each in the image."""
HAND = 1
"""The channel of the hand."""
STRIDE = 0.25
"""The largest move of a step along each axis. The plane is [-1, 1] x [-1, 1]."""
NEAR = 0.25
"""The distance at which a target is reached."""
RADIUS = 0.2
"""The radius of the discs in the image, in units of the plane."""
FAINT = 0.5
"""Pixels that are darker than this share of white show no disc."""
FAR = 2 * 2**0.5
"""The largest distance in the plane."""


class PixelReachEnvironment:
    """A hand and two targets, as discs in an image [3, size, size]. All slots move in one operation.

    A task such as `reach the blue disc` names the target; an empty task leaves the red target alone in the image. The
    first two numbers of an action move the hand by at most 0.25 along each axis. The reward of a step is the distance
    that it came nearer to the target, and 1 where it reaches it, which ends the episode with success.
    """

    is_keyed = True

    def __init__(
        self,
        *,
        size: Annotated[int, msgspec.Meta(ge=8)] = 24,
        actions: Annotated[int, msgspec.Meta(ge=2)] = 2,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] = 12,
    ) -> None:
        """
        Args:
            size: pixels along each side of the image.
            actions: numbers of an action, for policies of robots with more joints. Those after the second do nothing.
            max_steps: number of steps after which an episode is truncated.
        """
        self.size, self.max_steps = size, max_steps
        self.spaces = EnvironmentSpaces(
            observations={PIXELS: (3, size, size)}, actions=ContinuousActions(actions), most_steps=max_steps
        )
        axis = (torch.arange(size) + 0.5) * (2 / size) - 1
        self._grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"))  # [2, size, size], x and y of each pixel
        self._points = torch.zeros(0, 3, 2)  # by slot and channel: red target, hand, blue target
        self._wanted = torch.zeros(0, dtype=torch.int64)  # the channel of the target
        self._is_alone = torch.zeros(0, dtype=torch.bool)
        self._ages = torch.zeros(0, dtype=torch.int64)  # steps of the episode; max_steps where none runs

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """Start one episode in each slot. `unirl.types.environments.Environment.reset` has the contract."""
        self._grow(max(slots) + 1)
        for slot, start in zip(slots, starts, strict=True):
            generator = torch.Generator().manual_seed(start.seed)
            self._points[slot] = torch.rand(3, 2, generator=generator) * 1.6 - 0.8
            self._wanted[slot] = target_of(start.task)
            self._is_alone[slot] = not start.task
            self._ages[slot] = 0
        return self._observe(slots)

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        """Take one action in each slot. `unirl.types.environments.Environment.step` has the contract."""
        rows = torch.tensor(list(slots))
        over = self._ages[rows] >= self.max_steps
        assert not bool(over.any()), f"slots {rows[over].tolist()} have no episode: it ended, or never began"
        before = self._distances(rows)
        moved = self._points[rows, HAND] + STRIDE * actions[:, :2].float().clamp(-1, 1)
        self._points[rows, HAND] = moved.clamp(-1, 1)
        self._ages[rows] += 1
        after = self._distances(rows)
        reached = after < NEAR
        truncated = ~reached & (self._ages[rows] >= self.max_steps)
        self._ages[rows[reached]] = self.max_steps
        return EnvironmentStep(
            observations=self._observe(slots),
            rewards=before - after + reached.float(),
            terminated=reached,
            truncated=truncated,
            success=reached,
        )

    def render(self, slots: Sequence[int]) -> Tensor:
        """[B, 3, size, size] uint8 images of the slots."""
        return self._observe(slots)[PIXELS]

    def hands(self, slots: Sequence[int]) -> Tensor:
        """[B, 2] places of the hands, in the plane."""
        return self._points[list(slots), HAND]

    def close(self) -> None:
        """Forget all episodes."""
        self._ages.fill_(self.max_steps)

    def _grow(self, count: int) -> None:
        """Have at least `count` slots."""
        missing = max(count - len(self._ages), 0)
        self._points = torch.cat([self._points, torch.zeros(missing, 3, 2)])
        self._wanted = torch.cat([self._wanted, self._wanted.new_zeros(missing)])
        self._is_alone = torch.cat([self._is_alone, self._is_alone.new_zeros(missing)])
        self._ages = torch.cat([self._ages, self._ages.new_full((missing,), self.max_steps)])

    def _distances(self, rows: Tensor) -> Tensor:
        """[B] from the hand to the target."""
        return (self._points[rows, HAND] - self._points[rows, self._wanted[rows]]).norm(dim=1)

    def _observe(self, slots: Sequence[int]) -> Observations:
        rows = torch.tensor(list(slots))
        offsets = self._points[rows][:, :, :, None, None] - self._grid  # [B, 3, 2, size, size]
        discs = (offsets.square().sum(2) < RADIUS**2) & ~self._hidden(rows)[:, :, None, None]
        return {PIXELS: discs.to(torch.uint8) * 255}

    def _hidden(self, rows: Tensor) -> Tensor:
        """[B, 3] bool, the discs that an episode without an instruction does not have."""
        hidden = torch.zeros(len(rows), 3, dtype=torch.bool)
        hidden[:, COLOURS["blue"]] = self._is_alone[rows]
        return hidden


class DiscReward:
    """The reward of the environment, read from its images alone: for frames that a model predicts.

    The place of a disc is the mean of the pixels of its channel, weighted by how much brighter they are than grey. A
    disc that is not there counts as far away, so losing it costs reward.
    """

    def score(self, before: Tensor, frames: Tensor, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Rewards [B, C] and success [B, C] of frames [B, C, 3, H, W] uint8 after the frame `before` [B, 3, H, W]."""
        wanted = torch.tensor([target_of(task) for task in tasks])
        places = disc_places(torch.cat([before[:, None], frames], 1))  # [B, C + 1, 3, 2]
        targets = places[torch.arange(len(wanted)), :, wanted]
        distances = (places[:, :, HAND] - targets).norm(dim=-1).nan_to_num(FAR)
        success = distances[:, 1:] < NEAR
        return (distances[:, :-1] - distances[:, 1:] + success).float(), success


def disc_places(images: Tensor) -> Tensor:
    """[..., 3, 2] the places of the discs in images [..., 3, H, W] uint8, in the plane. NaN where there is none."""
    height, width = images.shape[-2:]
    bright = (images.double() / 255 - FAINT).clamp(min=0.0)
    total = bright.sum((-2, -1))
    across, down = ((torch.arange(n, dtype=torch.float64) + 0.5) * (2 / n) - 1 for n in (width, height))
    return torch.stack([bright.sum(-2) @ across, bright.sum(-1) @ down], -1) / total[..., None]


def target_of(task: str) -> int:
    """The channel of the target that a task names; that of the red one for an empty task.

    Raises:
        InvalidValueError: 2004, the task names no target, or both.
    """
    named = [channel for colour, channel in COLOURS.items() if colour in task.split()]
    if not task:
        return COLOURS["red"]
    if len(named) != 1:
        raise InvalidValueError(
            f"data_source.tasks: the task {task!r} must name one target, {' or '.join(COLOURS)}, such as "
            "`reach the blue disc`"
        )
    return named[0]


def stood_for(task: str) -> str:
    """The task of the stand-in for a task of a simulator: itself if it names a target, else one by its words."""
    if not task or any(colour in task.split() for colour in COLOURS):
        return task
    return f"reach the {sorted(COLOURS)[crc32(task.encode()) % len(COLOURS)]} disc"


def make_stand_in(
    id: str,
    *,
    render_mode: str | None,
    camera: str,
    size: tuple[int, int],
    actions: int,
    more_cameras: Sequence[str] = (),
    state: int = 0,
) -> gymnasium.Env[Any, Any]:
    """One such environment for Gymnasium, in place of a simulator with the same cameras and number of actions.

    Args:
        size: height and width of the image, which are equal.
        more_cameras: further cameras, which show the same image.
        state: numbers of the observation `state`. The first two are the place of the hand. 0: there is none.
    """
    import gymnasium
    from gymnasium import spaces

    slot = PixelReachEnvironment(size=min(size), actions=actions)
    shown: dict[str, gymnasium.Space[Any]] = {
        key: spaces.Box(0, 255, (min(size), min(size), 3), np.uint8) for key in (camera, *more_cameras)
    }
    if state:
        shown[STATE] = spaces.Box(-1.0, 1.0, (state,), np.float32)

    class StandIn(gymnasium.Env[Any, Any]):
        """Shows [H, W, 3] uint8 images of the cameras."""

        observation_space = spaces.Dict(shown)
        action_space = spaces.Box(-1.0, 1.0, (actions,), np.float32)

        def reset(
            self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            task = stood_for(str((options or {}).get("task", "")))
            return self._seen(slot.reset([0], [EpisodeStart(seed=seed or 0, task=task)])), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            step = slot.step([0], torch.from_numpy(np.asarray(action, np.float32))[None])
            ends = bool(step.terminated), bool(step.truncated)
            return self._seen(step.observations), float(step.rewards), *ends, {"success": bool(step.success)}

        def _seen(self, observations: Observations) -> dict[str, Any]:
            image = observations[PIXELS][0].permute(1, 2, 0).numpy()
            seen: dict[str, Any] = dict.fromkeys((camera, *more_cameras), image)
            if state:
                seen[STATE] = np.pad(slot.hands([0])[0].numpy(), (0, state - 2))
            return seen

    return StandIn()
