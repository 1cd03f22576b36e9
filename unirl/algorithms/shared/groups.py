"""Rows by group: weighted statistics in float64, of groups of any size whose rows stand anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

DEAD_SPREAD = 1e-6
"""A group is dead if max - min <= DEAD_SPREAD * max |r|: what differs by less is float32 round-off."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Which rows belong together and how much each counts; a row of weight 0 counts nowhere.

    Statistics come per group, [G]; `statistic[groups.index]` is that of each row's group, [B].
    """

    index: Tensor  # [B] int64, which group
    weights: Tensor  # [B] float64

    @staticmethod
    def of(ids: Sequence[str], weights: Tensor) -> Groups:
        """Rows with equal ids together, groups in order of appearance."""
        number = {id: i for i, id in enumerate(dict.fromkeys(ids))}
        return Groups(torch.tensor([number[id] for id in ids], dtype=torch.int64), weights)

    @staticmethod
    def one(weights: Tensor) -> Groups:
        """All rows together."""
        return Groups(torch.zeros(len(weights), dtype=torch.int64), weights)

    @property
    def counts(self) -> Tensor:
        """[B] bool: the row counts."""
        return self.weights > 0

    @property
    def totals(self) -> Tensor:
        """[G] sum of weights."""
        return self._sum(self.weights)

    @property
    def sizes(self) -> Tensor:
        """[G] float64, the number of rows that count."""
        return self._sum(self.counts.double())

    def mean(self, values: Tensor) -> Tensor:
        """[G] weighted mean; 0 for a group in which no row counts."""
        return self._sum(self.weights * values) / _or_one(self.totals)

    def std(self, values: Tensor, unbiased: bool = False) -> Tensor:
        """[G] standard deviation: over n, or (unbiased) over n - 1; with weights, over W - sum(w^2) / W."""
        variance = self.mean((values - self.mean(values)[self.index]).square())
        if unbiased:
            squares = self.totals.square()
            variance = variance * squares / _or_one(squares - self._sum(self.weights.square()))
        return variance.sqrt()

    def others(self) -> Tensor:
        """[B] W / (W - w): times (r - mean), it is r less the mean of the other rows of the group."""
        totals = self.totals[self.index]
        return totals / _or_one(totals - self.weights)

    def dead(self, values: Tensor) -> Tensor:
        """[G] bool: the values of all rows that count are equal."""
        high = self._extreme(values.where(self.counts, -torch.inf), "amax")
        low = self._extreme(values.where(self.counts, torch.inf), "amin")
        size = self._extreme(values.abs().where(self.counts, 0.0), "amax")
        return high - low <= DEAD_SPREAD * size

    def ranks(self, values: Tensor) -> Tensor:
        """[B] how many rows of the group stand below; equal values in row order, rows that do not count last."""
        order = values.where(self.counts, torch.inf).argsort(stable=True)
        order = order[self.index[order].argsort(stable=True)]
        ends = torch.bincount(self.index, minlength=self._num).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order)) - starts[self.index[order]]
        return ranks

    def trimmed(self, values: Tensor, share: float) -> Groups:
        """The groups without their int(n share) smallest and as many largest rows."""
        cut = (self.sizes * share + 1e-9).floor()  # 0.29 * 100 is a little less than 29
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
    """The divisor, or 1 where there is nothing to divide by: there the dividend is 0 too."""
    return divisor.where(divisor > 0, 1.0)
