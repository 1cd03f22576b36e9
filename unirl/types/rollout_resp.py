"""Responses of a rollout engine: a tree of tracks, to which rewards and advantages are attached before training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, Self, cast

import torch
from torch import Tensor

from unirl.types.batch import Batch, HeavyChange, map_value, row, shared
from unirl.types.conditions import Conditions
from unirl.types.credit import CREDIT_RULES, CreditRule, RewardOp
from unirl.types.primitives import Decoded
from unirl.types.results import Metrics
from unirl.types.reward import Answer, Failures
from unirl.types.rows import Rows
from unirl.types.segments import SegmentT, SegmentT_co


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Input of an advantage estimator: the rewards of all rows of a track, and the group of each row."""

    total: Tensor  # [B] float32
    components: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [B] float32
    group_ids: Sequence[str]  # rows of a group need not be adjacent
    weight: Tensor  # [B] float32; a row of weight 0 gets advantage 0 and does not affect others
    track: str = ""
    progress: float = 0.0
    """Fraction of the run that is done, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """Advantages and weights of all rows, and metrics."""

    advantages: Tensor  # [B] float32
    weight: Tensor  # [B] float32; the weight from `Scores`, or 0 for rows that are not trained
    metrics: Metrics


class AdvantageEstimator(Protocol):
    """Computes one advantage per row from the rewards of all rows. It is a pure function or `Stateful`."""

    def __call__(self, scores: Scores) -> AdvantageResult: ...


@dataclass(kw_only=True, eq=False)
class RolloutTrack(Batch, Generic[SegmentT_co]):
    """The samples of one modality in a rollout. Rows of weight 0 (dropped, padding) stay in it and are ignored."""

    sample_ids: list[str] = row()
    group_ids: list[str] = row()
    parent_track: str | None = shared(default=None)
    parent_ids: list[str] | None = row(optional=True)
    prompts: list[str] | None = row(optional=True)  # read by losses that differentiate the reward
    cut_prompts: list[bool] | None = row(optional=True)  # longer than the text encoder reads; None = not known
    conditions: Conditions = row()
    segment: SegmentT_co = row()
    decoded: Decoded | None = row(optional=True)
    rewards: Tensor | None = row(optional=True)  # [B] float32; NaN = could not be scored
    rewards_are_final: bool = shared(default=False)  # True: those of the children are included, or do not count
    component_rewards: dict[str, Tensor] | None = row(optional=True)  # name -> [B] float32
    logged_rewards: dict[str, Tensor] | None = row(optional=True)  # name -> [B] float32; NaN = not scored
    failures: list[Failures] | None = row(optional=True)  # () for rows without a failure
    answers: list[Answer | None] | None = row(optional=True)  # set if the reward judges answers
    reward_seconds: Tensor | None = row(optional=True)  # [B] float32, duration of the call that scored the row
    advantages: Tensor | None = row(optional=True)  # [B] float32
    weight: Tensor = row()  # [B] float32
    weight_version: Tensor = row()  # [B] int64, number of optimizer updates behind the sampling weights

    def sampled_as(self, kind: type[SegmentT]) -> RolloutTrack[SegmentT]:
        """This track, whose segment the caller knows to be a `kind`."""
        assert isinstance(self.segment, kind), f"the track has a {type(self.segment).__name__}, not a {kind.__name__}"
        return cast("RolloutTrack[SegmentT]", self)

    def costs(self) -> Tensor | None:
        """[B] int64 tokens of the segment and conditions of each row; None if they are the same for all rows."""
        batches: list[Batch] = [self.segment, *self.conditions.values()]
        parts = [batch.costs() for batch in batches]
        costs = [cost for cost in parts if cost is not None]
        return torch.stack(costs).sum(0) if costs else None

    def compute_advantages(
        self, estimator: AdvantageEstimator, progress: float = 0.0, name: str = "", elsewhere: Collection[str] = ()
    ) -> tuple[Self, Metrics]:
        """The track with advantages and weights from `estimator`, and metrics. Raises ValueError if it has no rewards.

        Args:
            progress: fraction of the run that is done, in [0, 1].
            name: name of the track. Stateful estimators keep separate state per track.
            elsewhere: components of the run, which are 0 in this track if no reward of this track has them.
        """
        if self.rewards is None:
            raise ValueError("compute_advantages needs rewards: score the track (or propagate rewards to it) first")
        scores = Scores(
            total=self.rewards,
            components={part: torch.zeros_like(self.rewards) for part in elsewhere} | (self.component_rewards or {}),
            group_ids=self.group_ids,
            weight=self.weight,
            track=name,
            progress=progress,
        )
        result = estimator(scores)
        return self.replace(advantages=result.advantages, weight=result.weight), result.metrics


@dataclass(frozen=True)
class RolloutResp(Rows):
    """Tracks by name. A child track has the name of its parent track and, per row, the sample id of its parent."""

    tracks: dict[str, RolloutTrack]

    def __post_init__(self) -> None:
        for name, track in self.tracks.items():
            if track.parent_track is None:
                continue
            if track.parent_track not in self.tracks:
                raise ValueError(
                    f"track {name!r} has the parent track {track.parent_track!r}, but the tracks are "
                    f"{sorted(self.tracks)}"
                )
            if track.parent_ids is None:
                raise ValueError(f"track {name!r} has a parent track but no parent ids")
            unknown = set(track.parent_ids) - set(self.tracks[track.parent_track].sample_ids)
            if unknown:
                raise ValueError(f"track {name!r}: parent id {min(unknown)!r} is not in track {track.parent_track!r}")

    def __len__(self) -> int:
        """The number of rows of the root track."""
        return len(self.root_track())

    def select(self, indices: Sequence[int]) -> RolloutResp:
        """The rows `indices` of the root track, in that order, each followed by its own descendants.

        Repeats are allowed. Each copy of a row comes with copies of its descendants, which have the same ids.
        """
        self.root_track()
        chosen: dict[str, list[int]] = {}
        for name in self.by_depth():
            parent = self.tracks[name].parent_track
            if parent is None:
                chosen[name] = list(indices)
            else:
                children = self._children_of_rows(name)
                chosen[name] = [child for row in chosen[parent] for child in children[row]]
        return RolloutResp({name: track.select(chosen[name]) for name, track in self.tracks.items()})

    def _children_of_rows(self, name: str) -> list[list[int]]:
        """For each row of the parent track, its children in track `name`.

        If rows are repeated, so are ids: the n-th row with some id is a child of the n-th row with its parent's id.
        """
        track = self.tracks[name]
        assert track.parent_track is not None and track.parent_ids is not None
        parents = self.tracks[track.parent_track].sample_ids
        row_of = {key: row for row, key in enumerate(zip(parents, _occurrences(parents), strict=True))}
        children: list[list[int]] = [[] for _ in parents]
        keys = zip(track.parent_ids, _occurrences(track.sample_ids), strict=True)
        for child, key in enumerate(keys):
            children[row_of[key]].append(child)
        return children

    @staticmethod
    def concat(parts: Sequence[RolloutResp]) -> RolloutResp:
        """One response with the rows of all `parts`, in order."""
        names = parts[0].tracks
        return RolloutResp({name: RolloutTrack.concat([part.tracks[name] for part in parts]) for name in names})

    def pick(self, names: Sequence[str]) -> RolloutResp:
        """The response with only these tracks. Links to other parent tracks are removed."""
        chosen = {}
        for name in names:
            track = self.tracks[name]
            parent_is_left_out = track.parent_track is not None and track.parent_track not in names
            chosen[name] = track.replace(parent_track=None, parent_ids=None) if parent_is_left_out else track
        return RolloutResp(chosen)

    def root_track(self) -> RolloutTrack:
        """The only track without a parent. Raises ValueError if there is not exactly one."""
        roots = [name for name, track in self.tracks.items() if track.parent_track is None]
        if len(roots) != 1:
            raise ValueError(f"expected exactly one root track, found {sorted(roots)}")
        return self.tracks[roots[0]]

    def with_track(self, name: str, track: RolloutTrack) -> RolloutResp:
        """A copy with the track `name` added or replaced."""
        return RolloutResp({**self.tracks, name: track})

    def children(self, name: str) -> list[str]:
        """Names of the child tracks of track `name`."""
        return [child for child, track in self.tracks.items() if track.parent_track == name]

    def root_groups(self, name: str) -> list[str]:
        """Group id of the root sample that each row of track `name` descends from."""
        track = self.tracks[name]
        if track.parent_track is None:
            return track.group_ids
        assert track.parent_ids is not None
        parents = self.tracks[track.parent_track].sample_ids
        group_of = dict(zip(parents, self.root_groups(track.parent_track), strict=True))
        return [group_of[parent] for parent in track.parent_ids]

    def drop(self, groups: Collection[str]) -> RolloutResp:
        """The response with weight 0 for all root samples of `groups` and for their descendants."""
        resp = self
        for name, track in self.tracks.items():
            dropped = torch.tensor([group in groups for group in self.root_groups(name)], device=track.weight.device)
            resp = resp.with_track(name, track.replace(weight=track.weight.where(~dropped, 0.0)))
        return resp

    def propagate_rewards(self, op: RewardOp = "mean") -> RolloutResp:
        """Rewards propagated up the tree: a row gets those of its children of weight > 0, by a rule.

        They are added to the reward that a row of a parent track has itself, unless this one is final. A track without
        rewards below a scored track stays without: it can inherit advantages. Raises ValueError if any other leaf has
        no rewards, if a track has two child tracks, if one of its rows of weight > 0 has no child, or if a parent and
        its child have different components of one name.
        """
        resp = self
        for name in reversed(self.by_depth()):
            if resp._takes_credit(name):
                resp = resp.with_track(name, resp._rewarded(name, op))
        return resp

    def with_scores_above(self, name: str) -> RolloutTrack:
        """The track `name`, whose rows also have the scores and failures of the rows that they descend from.

        A component that a parent has from its children is that of the row itself. A row has no reward if a row above
        it has none.
        """
        track = self.tracks[name]
        if track.parent_track is None:
            return track
        above, rows = self.with_scores_above(track.parent_track), self._parent_rows(name)
        scores = {
            key: {part: column[rows] for part, column in columns.items()} | (vars(track)[key] or {})
            for key in ("component_rewards", "logged_rewards")
            if (columns := vars(above)[key]) is not None
        }
        track = track.replace(**scores)
        if above.failures is not None:
            track = track.replace(failures=_joined_failures(track, [above.failures[row] for row in rows]))
        if above.rewards is not None and track.rewards is not None:
            track = track.replace(rewards=track.rewards.where(above.rewards[rows].isfinite(), torch.nan))
        return track

    def only_best(self, name: str) -> RolloutResp:
        """The response in which only the best child of each parent keeps its weight in track `name`.

        The best child has the highest reward of those of weight > 0; of several, it is the first. A track without a
        parent or without rewards stays as it is.
        """
        track = self.tracks[name]
        if track.parent_track is None or track.rewards is None:
            return self
        best = {row for members in self._rewarded_children(name, best_only=True) for row in members}
        is_best = torch.tensor([row in best for row in range(len(track))], device=track.weight.device)
        return self.with_track(name, track.replace(weight=track.weight.where(is_best, 0.0)))

    def inherit_advantages(self, name: str) -> RolloutResp:
        """Advantages propagated down: every row of track `name` gets the advantage of its parent row.

        A row gets weight 0 if its parent has weight 0.
        """
        track = self.tracks[name]
        if track.parent_track is None:
            raise ValueError(f"track {name!r} has no parent to inherit advantages from")
        parent = self.tracks[track.parent_track]
        if parent.advantages is None:
            raise ValueError(f"track {track.parent_track!r} has no advantages yet")
        rows = self._parent_rows(name)
        weight = track.weight.where(parent.weight[rows] > 0, 0.0)
        advantages = parent.advantages[rows].where(weight > 0, 0.0)
        return self.with_track(name, track.replace(advantages=advantages, weight=weight))

    def by_depth(self) -> list[str]:
        """Names of the tracks, parents before their children."""

        def depth(name: str) -> int:
            parent = self.tracks[name].parent_track
            return 0 if parent is None else 1 + depth(parent)

        return sorted(self.tracks, key=depth)

    def _parent_rows(self, name: str) -> list[int]:
        """For each row of track `name`, the number of its parent row."""
        track = self.tracks[name]
        assert track.parent_track is not None and track.parent_ids is not None
        row_of = {sample: i for i, sample in enumerate(self.tracks[track.parent_track].sample_ids)}
        return [row_of[parent_id] for parent_id in track.parent_ids]

    def _takes_credit(self, name: str) -> bool:
        """True if the rewards of the track's children are still to be added to its own, or are all that it gets."""
        track = self.tracks[name]
        if track.rewards is None:
            return not self._can_inherit(name)
        children = [self.tracks[child] for child in self.children(name)]
        return not track.rewards_are_final and any(child.rewards is not None for child in children)

    def _can_inherit(self, name: str) -> bool:
        """True if no child of the track has rewards and one of its ancestors does."""
        if any(self.tracks[child].rewards is not None for child in self.children(name)):
            return False
        parent = self.tracks[name].parent_track
        while parent is not None and self.tracks[parent].rewards is None:
            parent = self.tracks[parent].parent_track
        return parent is not None

    def _rewarded(self, name: str, op: RewardOp) -> RolloutTrack:
        children = self.children(name)
        if not children:
            raise ValueError(f"track {name!r} is a leaf without rewards: score it first")
        if len(children) > 1:
            raise ValueError(f"track {name!r} has children {children}: it is not defined which rewards to take")
        rule = CREDIT_RULES[op]
        parent, child = self.tracks[name], self.tracks[children[0]]
        rows = self._rewarded_children(children[0], rule.best_only)
        for sample, weight, members in zip(parent.sample_ids, parent.weight, rows, strict=True):
            if weight > 0 and not members:
                raise ValueError(f"row {sample!r} of track {name!r} has no child of weight > 0 in {children[0]!r}")
        assert child.rewards is not None
        own = parent.component_rewards or {}
        for part in own.keys() & (child.component_rewards or {}).keys():
            raise ValueError(f"tracks {name!r} and {children[0]!r} both have a component {part!r}: rename one of them")
        credit = {part: _reduced(scores, rows, rule) for part, scores in (child.component_rewards or {}).items()}
        rewards = _reduced(child.rewards, rows, rule)
        return parent.replace(
            rewards=rewards if parent.rewards is None else parent.rewards + rewards,
            component_rewards=own | credit or None,
            rewards_are_final=True,
        )

    def _rewarded_children(self, name: str, best_only: bool) -> list[list[int]]:
        """For each row of the parent track, its children of weight > 0 in track `name`, or only the best of them."""
        track = self.tracks[name]
        assert track.rewards is not None
        rewards, weight = track.rewards.tolist(), track.weight.tolist()
        rows = [[row for row in members if weight[row] > 0] for members in self._children_of_rows(name)]
        if not best_only:
            return rows
        return [[max(members, key=lambda row: rewards[row])] if members else [] for members in rows]


def _reduced(scores: Tensor, rows: Sequence[list[int]], rule: CreditRule) -> Tensor:
    """[B] float32 reward of each parent from the scores of its children; 0 for a parent without children."""
    return torch.stack([rule.reduce(scores[of]) if of else scores.new_zeros(()) for of in rows]).float()


def _joined_failures(track: RolloutTrack, above: Sequence[Failures]) -> list[Failures]:
    """For each row, its own failures and those of the rows above it, first those that cost it its reward."""
    own: Sequence[Failures] = track.failures or [()] * len(track)
    lost = [False] * len(track) if track.rewards is None else (~track.rewards.isfinite()).tolist()
    return [(*o, *a) if first else (*a, *o) for o, a, first in zip(own, above, lost, strict=True)]


def _occurrences(ids: Sequence[str]) -> list[int]:
    """For each entry, the number of equal entries before it."""
    counters: defaultdict[str, count[int]] = defaultdict(count)
    return [next(counters[entry]) for entry in ids]


@map_value.register
def _(value: RolloutResp, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> RolloutResp:
    return RolloutResp({name: track.map_tensors(fn, heavy) for name, track in value.tracks.items()})
