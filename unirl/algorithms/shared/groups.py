"""Rows by group: weighted statistics, selection of the rows to train, and pairs of winner and loser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.types.results import Metric, Metrics
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.rows import rows_by_key

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

EQUAL_TOLERANCE = 1e-6
"""Values are equal if max - min <= EQUAL_TOLERANCE * max |r|. A smaller difference is float32 round-off."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The group and the weight of each row. Groups may have any size and rows any order; weight 0 excludes a row.

    All statistics are float64. A statistic has one entry per group, [G]; `statistic[groups.index]` expands it to rows,
    [B].
    """

    index: Tensor  # [B] int64, group number
    weights: Tensor  # [B] float64

    @staticmethod
    def of(ids: Sequence[str], weights: Float[Tensor, "B"]) -> Groups:
        """Rows with equal ids form a group. Groups are numbered in order of appearance."""
        number = {id: i for i, id in enumerate(dict.fromkeys(ids))}
        return Groups(torch.tensor([number[id] for id in ids], dtype=torch.int64), weights)

    @staticmethod
    def one(weights: Float[Tensor, "B"]) -> Groups:
        """All rows as one group."""
        return Groups(torch.zeros(len(weights), dtype=torch.int64), weights)

    @property
    def valid(self) -> Bool[Tensor, "B"]:
        """[B] bool, rows with a weight > 0."""
        return self.weights > 0

    @property
    def totals(self) -> Float[Tensor, "G"]:
        """[G] sum of weights."""
        return self._sum(self.weights)

    @property
    def sizes(self) -> Float[Tensor, "G"]:
        """[G] float64 number of valid rows."""
        return self._sum(self.valid.double())

    def mean(self, values: Float[Tensor, "B"]) -> Float[Tensor, "G"]:
        """[G] weighted mean; 0 for a group without valid rows."""
        return self._sum(self.weights * values) / _or_one(self.totals)

    def std(self, values: Float[Tensor, "B"], unbiased: bool = False) -> Float[Tensor, "G"]:
        """[G] standard deviation, dividing by n or (unbiased) n - 1; with weights, by W - sum(w^2) / W."""
        variance = self.mean((values - self.mean(values)[self.index]).square())
        if unbiased:
            squares = self.totals.square()
            variance = variance * squares / _or_one(squares - self._sum(self.weights.square()))
        return variance.sqrt()

    def others(self) -> Float[Tensor, "B"]:
        """[B] W / (W - w). This factor times (r - mean) is r minus the mean of the other rows of the group."""
        totals = self.totals[self.index]
        return totals / _or_one(totals - self.weights)

    def all_equal(self, values: Float[Tensor, "B"]) -> Bool[Tensor, "G"]:
        """[G] bool, the values of all valid rows are equal within EQUAL_TOLERANCE."""
        high = self._extreme(values.where(self.valid, -torch.inf), "amax")
        low = self._extreme(values.where(self.valid, torch.inf), "amin")
        size = self._extreme(values.abs().where(self.valid, 0.0), "amax")
        return high - low <= EQUAL_TOLERANCE * size

    def ranks(self, values: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
        """[B] rank within the group, ascending. Ties are in row order; invalid rows come last."""
        order = values.where(self.valid, torch.inf).argsort(stable=True)
        order = order[self.index[order].argsort(stable=True)]
        ends = torch.bincount(self.index, minlength=self._num).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order)) - starts[self.index[order]]
        return ranks

    def trimmed(self, values: Float[Tensor, "B"], share: float) -> Groups:
        """The groups without their int(n share) smallest and as many largest rows."""
        cut = (self.sizes * share + 1e-9).floor()  # the offset corrects rounding: 0.29 * 100 is slightly less than 29
        ranks = self.ranks(values)
        inside = (ranks >= cut[self.index]) & (ranks < (self.sizes - cut)[self.index])
        return replace(self, weights=self.weights.where(inside, 0.0))

    @property
    def _num(self) -> int:
        return int(self.index.max()) + 1 if len(self.index) else 0

    def _sum(self, values: Tensor) -> Tensor:
        return torch.zeros(self._num, dtype=torch.float64).index_add_(0, self.index, values)

    def _extreme(self, values: Tensor, reduce: Literal["amax", "amin"]) -> Tensor:
        start = torch.zeros(self._num, dtype=torch.float64)
        return start.scatter_reduce_(0, self.index, values, reduce, include_self=False)


def _or_one(divisor: Tensor) -> Tensor:
    """The divisor, with 0 replaced by 1. The dividend is 0 there, too."""
    return divisor.where(divisor > 0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Rules that set the weight of rows to 0 after their advantages are known. By default every row is trained.

    No row is removed, and every statistic uses the whole group. Only the denominator of the loss changes: the selected
    rows share the update among themselves.
    """

    keep: int | None = None
    """Rows to train per group: half of them the best, half the worst (DanceGRPO's best-of-n); null = all."""
    drop_dead: bool = False
    """Leave out groups whose rewards are all equal (DAPO, arXiv:2503.14476, section 3.2)."""
    mean_range: tuple[float, float] | None = None
    """Leave out groups whose mean reward lies outside [low, high]: too hard, or too easy. Null = no limit."""

    def __post_init__(self) -> None:
        if self.keep is not None and (self.keep < 2 or self.keep % 2):
            raise InvalidValueError(f"select.keep must be an even number >= 2, half best half worst, got {self.keep}")
        if self.mean_range is not None and not self.mean_range[0] <= self.mean_range[1]:
            raise InvalidValueError(f"select.mean_range must be [low, high], low <= high, got {[*self.mean_range]}")

    def __call__(
        self,
        advantages: Float[Tensor, "B"],
        rewards: Sequence[Float[Tensor, "B"]],
        total: Float[Tensor, "B"],
        groups: Groups,
    ) -> tuple[Bool[Tensor, "B"], Metrics]:
        """[B] bool mask of the rows to train, and metrics.

        Args:
            advantages: [B] before clipping, because clipped advantages tie.
            rewards: each [B]; `drop_dead` leaves out a group that has equal values in all of them.
            total: [B], the reward that `mean_range` limits.
        """
        passed = self._passed(rewards, total, groups)  # [G]
        trained = groups.valid & passed[groups.index] & self._extremes(advantages, groups)
        if self == Selection():
            return trained, {}
        present = groups.totals > 0
        return trained, {
            "rollout/filtered_group_ratio": _fraction(present & ~passed, present),
            "rollout/selected_ratio": _fraction(trained, groups.valid),
        }

    def _passed(self, rewards: Sequence[Tensor], total: Tensor, groups: Groups) -> Tensor:
        """[G] bool, the group satisfies `drop_dead` and `mean_range`."""
        passed = torch.ones_like(groups.totals, dtype=torch.bool)
        if self.drop_dead:
            passed &= ~torch.stack([groups.all_equal(values) for values in rewards]).all(0)
        if self.mean_range is not None:
            mean = groups.mean(total)
            passed &= (mean >= self.mean_range[0]) & (mean <= self.mean_range[1])
        return passed

    def _extremes(self, advantages: Tensor, groups: Groups) -> Tensor:
        """[B] bool, the row is among the keep / 2 best or worst of its group."""
        if self.keep is None:
            return torch.ones_like(advantages, dtype=torch.bool)
        ranks, half = groups.ranks(advantages), self.keep // 2
        return (ranks < half) | (ranks >= groups.sizes[groups.index] - half)


def _fraction(selected: Tensor, all_: Tensor) -> Metric:
    return Metric(float(selected.sum()), float(all_.sum()), "mean")


def best_and_worst(
    advantages: Float[Tensor, "B"], group_ids: Sequence[str], weight: Float[Tensor, "B"], num_pairs: int
) -> tuple[list[int], list[bool]]:
    """Pairs the best row of each group with the worst, the second best with the second worst, and so on.

    Returns the rows, each winner followed by its loser, and for each pair True if both rows are valid and the winner is
    better. Other pairs are not trained.

    Groups come in order of appearance, ties in row order. Rows of weight 0 are used only if a group has too few others.
    A group of n rows has at most min(num_pairs, n // 2) pairs.
    """
    values, valid = advantages.tolist(), (weight > 0).tolist()
    rows: list[int] = []
    is_informative: list[bool] = []
    for members in rows_by_key(group_ids).values():
        count = min(num_pairs, len(members) // 2)
        ranked = _ranked(members, values, valid, 2 * count)
        for winner, loser in zip(ranked[:count], reversed(ranked[count:]), strict=True):
            rows += [winner, loser]
            is_informative.append(valid[winner] and valid[loser] and values[winner] > values[loser])
    return rows, is_informative


def _ranked(members: list[int], values: list[float], valid: list[bool], count: int) -> list[int]:
    """`count` rows from best to worst without the middle ones. Rows of weight 0 pad the middle if needed."""
    ordered = sorted((row for row in members if valid[row]), key=lambda row: -values[row])
    padding = [row for row in members if not valid[row]][: max(0, count - len(ordered))]
    half = min(count // 2, -(-len(ordered) // 2))
    return ordered[:half] + padding + ordered[max(half, len(ordered) - count // 2) :]


def in_pairs(track: RolloutTrack, num_pairs: int) -> RolloutTrack:
    """The rows to train: up to `num_pairs` pairs per group, each winner followed by its loser.

    An uninformative pair keeps its place with weight 0, so that groups of equal size give equally many rows.
    """
    assert track.advantages is not None, "pairs are made by advantages: compute_advantages comes first"
    rows, is_informative = best_and_worst(track.advantages, track.group_ids, track.weight, num_pairs)
    chosen = track.select(rows)
    trained = torch.tensor(is_informative, device=chosen.weight.device).repeat_interleave(2)
    return chosen.replace(weight=torch.where(trained, chosen.weight, 0.0))
