"""Demonstrations: episodes of a data set as rows of decisions, checked against the policy that learns from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from unirl.config.errors import DataError, InvalidValueError, ResumeError, did_you_mean
from unirl.data.episodes import Array, EpisodeSource, RecordedEpisode, open_episodes
from unirl.sde.noise import key_seed
from unirl.types.batch import bounds_of
from unirl.types.environments import NOT_REPORTED, ActionSpace, ContinuousActions, DiscreteActions
from unirl.types.facts import ActionFacts
from unirl.types.segments import ActionSegment

TOY = "toy"
"""The path of demonstrations at random, of the shapes of the policy."""
TOLERANCE = 1e-4
"""The largest distance outside of [-1, 1] that counts as rounding of a scaled action, which is then clipped."""
DIGEST = "digest"


@dataclass(frozen=True, kw_only=True)
class DemonstrationsConfig:
    """A data set of Minari or LeRobot, from which a policy learns."""

    toy: ClassVar[Mapping[str, object]] = {"path": TOY, "keys": {}, "low": None, "high": None}

    path: str
    """The folder of the data set, with data/metadata.json (Minari) or meta/info.json (LeRobot v2 or v3)."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Names in the data set by the names of the policy's observations, where they differ."""
    low: tuple[float, ...] | None = None
    """The recorded action that becomes -1, by dimension. null: the lower bound of Minari's action space, else -1."""
    high: tuple[float, ...] | None = None
    """The recorded action that becomes 1, by dimension. null: the upper bound of Minari's action space, else 1."""
    clip: bool = False
    """Clip actions that lie outside of [-1, 1] after scaling; false = refuse them."""

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise InvalidValueError("low and high belong together. Give both, or leave out both")
        low, high = self.low or (), self.high or ()
        if len(low) != len(high) or any(a >= b for a, b in zip(low, high, strict=True)):
            raise InvalidValueError(
                f"low={list(low)} and high={list(high)} must have a number for each dimension of an action, and each "
                "of low must be < that of high"
            )


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The episodes of a data set. A checkpoint has their digest alone, so that the data cannot change unseen."""

    path: str
    segment: ActionSegment
    """One row per episode. Actions are [sum L, A] in [-1, 1], or [sum L] numbers of discrete actions. Log-probs
    are NaN, and so are rewards if the data set has none."""

    @property
    def has_rewards(self) -> bool:
        """The data set has the reward of every action."""
        return not bool(self.segment.rewards.isnan().any())

    def digest(self) -> Tensor:
        """[32] uint8, the SHA-256 of everything that was read."""
        total = hashlib.sha256()
        names = ("actions", "rewards", "terminated", "offsets")
        parts = {name: vars(self.segment)[name] for name in names} | self.segment.observations
        for name, values in sorted(parts.items()):
            total.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            total.update(values.contiguous().numpy().tobytes())
        return torch.frombuffer(bytearray(total.digest()), dtype=torch.uint8)

    # The state that a checkpoint contains

    def state(self) -> dict[str, Tensor]:
        """The digest of the data."""
        return {DIGEST: self.digest()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ResumeError (7002) if the checkpoint was trained with other data."""
        if not torch.equal(tensors[DIGEST], self.digest()):
            raise ResumeError(
                f"stack.offline.path={self.path}: the demonstrations differ from those of the checkpoint. Restore the "
                "data set, or start a new run with resume=none"
            )


def load_demonstrations(config: DemonstrationsConfig, facts: ActionFacts) -> Demonstrations:
    """All episodes of a data set, for a policy with these facts.

    Raises:
        NotFoundError: 4001, there is no data set.
        DataError: 4002, the data do not fit the policy. The message names the file, the key and the way out.
        DependencyError: 3001, the library that reads the data set is missing.
    """
    if config.path == TOY:
        return Demonstrations(path=TOY, segment=toy_segment(facts))
    path = Path(config.path).expanduser()
    source = open_episodes(path)
    names = {key: config.keys.get(key, source.key_of(key)) for key in facts.observations}
    for key, name in names.items():
        if name not in source.keys:
            raise DataError(
                f"stack.offline: the policy reads the observation {key!r}, and {path} has no {name!r} but "
                f"{', '.join(source.keys) or 'no observation'}.{did_you_mean(name, source.keys)} Name the right one in "
                f"stack.offline.keys={{{key}: NAME}}; frames of videos are not read"
            )
    rows = [_row(episode, names, config, source, facts) for episode in source.read(list(names.values()))]
    rows = [row for row in rows if bool(row.loss_mask.any())]
    if not rows:
        raise DataError(f"stack.offline.path={path}: the data set has no episode with an action. Record one")
    return Demonstrations(path=config.path, segment=ActionSegment.concat(rows))


def _row(
    episode: RecordedEpisode,
    names: Mapping[str, str],
    config: DemonstrationsConfig,
    source: EpisodeSource,
    facts: ActionFacts,
) -> ActionSegment:
    """The decisions of one episode, and the observation that followed them unless the task ended."""
    length = len(episode.actions)
    total = length if episode.terminated else length + 1
    observations = {}
    for key, name in names.items():
        values = _observation(episode, key, episode.observations[name], facts)
        if len(values) not in (length, length + 1) or len(values) < total:
            raise DataError(f"{episode.name}: {name} has {len(values)} entries for {length} actions. It needs {total}")
        observations[key] = values[:total]
    if episode.rewards is not None and not np.isfinite(episode.rewards).all():
        raise DataError(f"{episode.name}: the reward of step {_first(~np.isfinite(episode.rewards))} is not finite")
    rewards = np.full(length, np.nan) if episode.rewards is None else episode.rewards
    if rewards.shape != (length,):
        raise DataError(f"{episode.name}: rewards have shape {rewards.shape} for {length} actions")
    actions = _actions(episode, config, source, facts.actions)
    return segment_of(observations, actions, torch.as_tensor(rewards.astype(np.float32)), episode.terminated)


def _observation(episode: RecordedEpisode, key: str, values: Array, facts: ActionFacts) -> Tensor:
    """[L or L + 1, *shape] one observation: float32 numbers, or uint8 pixels [C, H, W]."""
    shape = tuple(facts.observations[key])
    if len(shape) == 3 and values.dtype == np.uint8 and values.shape[1:] == (*shape[1:], shape[0]):
        values = values.transpose(0, 3, 1, 2)
    if values.dtype != np.uint8:
        values = values.astype(np.float32)
        if len(shape) == 1 and values.ndim == 1:
            values = values[:, None]  # a column of single numbers
    if values.shape[1:] != shape:
        raise DataError(
            f"{episode.name}: the observation {key!r} has shape {list(values.shape[1:])}, and the policy reads "
            f"{list(shape)}. Take a data set of the environment of the recipe, or another one in stack.offline.keys"
        )
    if values.dtype != np.uint8 and not np.isfinite(values).all():
        bad = _first(~np.isfinite(values))
        raise DataError(
            f"{episode.name}: the observation {key!r} of step {bad} has numbers that are not finite. Leave out the "
            "episode, or record it again"
        )
    return torch.from_numpy(np.array(values))


def _actions(
    episode: RecordedEpisode, config: DemonstrationsConfig, source: EpisodeSource, space: ActionSpace
) -> Tensor:
    """[L, A] actions in [-1, 1], or [L] numbers of discrete ones."""
    values = episode.actions
    if isinstance(space, DiscreteActions):
        if not np.issubdtype(values.dtype, np.integer):
            raise DataError(f"{episode.name}: actions are {values.dtype}, and the policy has {space.describe()}")
        numbers = values.reshape(len(values)) - source.first_action
        outside = (numbers < 0) | (numbers >= space.count)
        if outside.any():
            raise DataError(
                f"{episode.name}: action {numbers[outside][0]} of step {_first(outside)} is none of the policy's "
                f"{space.describe()}"
            )
        return torch.from_numpy(numbers.astype(np.int64))
    values = values.reshape(len(values), -1).astype(np.float64)
    if values.shape[1] != space.size:
        raise DataError(
            f"{episode.name}: actions have {values.shape[1]} dimensions, and the policy has {space.describe()}. Take a "
            "data set of the environment of the recipe"
        )
    low, high = _bounds(episode, config, source, space)
    scaled = (values - (high + low) / 2) / ((high - low) / 2)
    beyond: Array = np.asarray((np.abs(scaled) > 1 + TOLERANCE).any(1))
    if not np.isfinite(scaled).all():
        raise DataError(f"{episode.name}: the action of step {_first(~np.isfinite(scaled))} is not finite")
    if beyond.any() and not config.clip:
        raise DataError(
            f"{episode.name}: the action of step {_first(beyond)} is {values[beyond][0].round(4).tolist()}, outside "
            f"of the bounds {low.tolist()} to {high.tolist()}. Set stack.offline.low and high to those of the recorded "
            "actions, or stack.offline.clip=true"
        )
    return torch.from_numpy(scaled.clip(-1, 1).astype(np.float32))


def _bounds(
    episode: RecordedEpisode, config: DemonstrationsConfig, source: EpisodeSource, space: ContinuousActions
) -> tuple[Array, Array]:
    """[A], [A] the recorded actions that become -1 and 1."""
    unit = np.ones(space.size)
    low, high = source.bounds or (-unit, unit)
    if config.low is not None and config.high is not None:
        low, high = np.asarray(config.low), np.asarray(config.high)
        if low.shape != (space.size,):
            raise InvalidValueError(
                f"stack.offline.low and high have {len(low)} numbers, and the policy has {space.describe()}"
            )
    low, high = np.float64(low).reshape(-1), np.float64(high).reshape(-1)
    if not np.isfinite(high - low).all():
        raise DataError(
            f"{episode.name}: its action space has the bounds {low.tolist()} to {high.tolist()}, which cannot be "
            "scaled to [-1, 1]. Set stack.offline.low and stack.offline.high"
        )
    return low, high


def _first(where: Array) -> int:
    """The first entry along dimension 0 that has a True."""
    return int(np.nonzero(where)[0][0])


def segment_of(observations: Mapping[str, Tensor], actions: Tensor, rewards: Tensor, terminated: bool) -> ActionSegment:
    """One episode as a row. Of observations that are one more than actions, the last one is context.

    Args:
        observations: key -> [L or L + 1, *shape].
        actions: [L, ...]
        rewards: [L]
        terminated: the last action ended the task.
    """
    length, total = len(actions), len(next(iter(observations.values())))
    decided = torch.arange(total) < length
    is_last = torch.arange(total) == length - 1

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(total - length, *values.shape[1:])])

    return ActionSegment(
        observations=dict(observations),
        actions=padded(actions),
        logp=torch.full((total,), torch.nan),
        loss_mask=decided,
        rewards=padded(rewards),
        terminated=is_last & terminated,
        truncated=is_last & (not terminated),
        success=torch.full((total,), NOT_REPORTED, dtype=torch.int8),
        num_steps=decided.long(),
        offsets=bounds_of([total]),
        finished=torch.tensor([terminated]),
        anchors={},
    )


def toy_segment(facts: ActionFacts, episodes: int = 4, length: int = 8) -> ActionSegment:
    """Demonstrations at random for a policy with these facts, the same in every run."""
    draw = torch.Generator().manual_seed(key_seed(0, "demonstrations"))
    rows = []
    for episode in range(episodes):
        observations = {}
        for key, shape in facts.observations.items():
            pixels = torch.randint(256, (length + 1, *shape), generator=draw, dtype=torch.uint8)
            observations[key] = pixels if len(shape) == 3 else torch.randn(length + 1, *shape, generator=draw)
        if isinstance(facts.actions, DiscreteActions):
            actions = torch.randint(facts.actions.count, (length,), generator=draw)
        else:
            actions = 2 * torch.rand(length, facts.actions.size, generator=draw) - 1
        terminated = episode % 2 == 0
        seen = {key: value[: length + (not terminated)] for key, value in observations.items()}
        rows.append(segment_of(seen, actions, torch.rand(length, generator=draw), terminated))
    return ActionSegment.concat(rows)
