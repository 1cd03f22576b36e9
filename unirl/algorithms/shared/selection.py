"""Which scored rows are trained: the best and worst of a group, and groups that can teach something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.shared.groups import Groups
from unirl.config.errors import InvalidValueError
from unirl.types.results import Metric, Metrics


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Rules that give rows weight 0 after their advantages are known. By default every row is trained.

    No row is removed, and every statistic is that of the whole group. What changes is the denominator of the loss: the
    rows that remain share the update among themselves.
    """

    keep: int | None = None
    """Rows of a group that are trained: half of them the best, half the worst by advantage (DanceGRPO's best-of-n)."""
    drop_dead: bool = False
    """Leave out groups whose rewards are all equal (DAPO, arXiv:2503.14476, section 3.2)."""
    mean_range: tuple[float, float] | None = None
    """Leave out groups whose mean reward lies outside [low, high]: too hard, or too easy."""

    def __post_init__(self) -> None:
        if self.keep is not None and (self.keep < 2 or self.keep % 2):
            raise InvalidValueError(f"select.keep must be an even number >= 2, half best half worst, got {self.keep}")
        if self.mean_range is not None and not self.mean_range[0] <= self.mean_range[1]:
            raise InvalidValueError(f"select.mean_range must be [low, high], low <= high, got {[*self.mean_range]}")

    def __call__(
        self, advantages: Tensor, rewards: Sequence[Tensor], total: Tensor, groups: Groups
    ) -> tuple[Tensor, Metrics]:
        """[B] bool: the row is trained; and how many are.

        Args:
            advantages: [B] not yet clipped: clipped ones tie.
            rewards: each [B]; a group is dead if it is dead in all of them.
            total: [B], of which `mean_range` speaks.
        """
        passed = self._pass(rewards, total, groups)  # [G]
        trained = groups.counts & passed[groups.index] & self._extremes(advantages, groups)
        if self == Selection():
            return trained, {}
        present = groups.totals > 0
        return trained, {
            "rollout/filtered_group_ratio": _share(present & ~passed, present),
            "rollout/selected_ratio": _share(trained, groups.counts),
        }

    def _pass(self, rewards: Sequence[Tensor], total: Tensor, groups: Groups) -> Tensor:
        """[G] bool: the group obeys both rules."""
        passed = torch.ones_like(groups.totals, dtype=torch.bool)
        if self.drop_dead:
            passed &= ~torch.stack([groups.dead(values) for values in rewards]).all(0)
        if self.mean_range is not None:
            mean = groups.mean(total)
            passed &= (mean >= self.mean_range[0]) & (mean <= self.mean_range[1])
        return passed

    def _extremes(self, advantages: Tensor, groups: Groups) -> Tensor:
        """[B] bool: among the best or the worst keep / 2 of its group."""
        if self.keep is None:
            return torch.ones_like(advantages, dtype=torch.bool)
        ranks, half = groups.ranks(advantages), self.keep // 2
        return (ranks < half) | (ranks >= groups.sizes[groups.index] - half)


def _share(part: Tensor, whole: Tensor) -> Metric:
    return Metric(float(part.sum()), float(whole.sum()), "mean")
