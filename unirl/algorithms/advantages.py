"""Rewards to advantages: pure estimators in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, RewardError
from unirl.types.results import Metric, Metrics
from unirl.types.rollout_resp import AdvantageResult

DEAD_SPREAD = 1e-6
"""A group is dead if max - min <= DEAD_SPREAD * max |r|: what differs by less is float32 round-off."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage:
    """A = clip((r - mean) / (std + eps)), mean over the group (GRPO, arXiv:2402.03300, section 4.1).

    Population std, eps outside the root. A group whose rewards are all equal gives exactly 0 and is counted.
    """

    std: Literal["group", "batch", "none"] = "group"
    """The divisor: of the group, of all rewards of the step (Flow-GRPO), or none (Dr.GRPO: centred only)."""
    scope: Literal["group", "global"] = "group"
    """What is centred: each group by its own mean, or all rows as if they were one group."""
    clip: float | None = 5.0
    """Bound on |A|; absent = none."""
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise ConfigError(f"advantage.clip must be > 0, got {self.clip}; write null for no bound", code=2004)
        if self.eps <= 0:
            raise ConfigError(f"advantage.eps must be > 0, got {self.eps}", code=2004)

    def __call__(self, rewards: Tensor, group_ids: Sequence[str], weight: Tensor) -> AdvantageResult:
        """
        Args:
            rewards: [B]; a row of weight > 0 must be finite.
            group_ids: B ids; siblings may stand anywhere.
            weight: [B]; a row of weight 0 gets advantage 0 and changes no other row.
        """
        weights = weight.detach().double().cpu()
        check_finite(rewards, weights, group_ids)
        values = torch.where(weights > 0, rewards.detach().double().cpu(), 0.0)
        groups = Groups([""] * len(group_ids) if self.scope == "global" else group_ids, weights)
        centred = values - groups.mean(values)[groups.index]
        advantages = centred / self._divisor(values, centred, groups)
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)
        dead = groups.dead(values)
        advantages = torch.where((weights > 0) & ~dead[groups.index], advantages, 0.0)
        return AdvantageResult(advantages.float(), _metrics(advantages, weights, dead, groups))

    def _divisor(self, values: Tensor, centred: Tensor, groups: Groups) -> Tensor:
        """[B], or one number for all rows."""
        if self.std == "none":
            return torch.ones((), dtype=torch.float64)
        if self.std == "group":
            return groups.mean(centred.square()).sqrt()[groups.index] + self.eps
        mean = (groups.weights * values).sum() / groups.weights.sum()
        return ((groups.weights * (values - mean).square()).sum() / groups.weights.sum()).sqrt() + self.eps


class Groups:
    """Rows by group id, and weighted statistics per group."""

    def __init__(self, ids: Sequence[str], weights: Tensor) -> None:
        number = {id: i for i, id in enumerate(dict.fromkeys(ids))}
        self.index = torch.tensor([number[id] for id in ids], dtype=torch.int64)  # [B] which group
        self.weights = weights  # [B] float64
        self.totals = self._sum(weights)  # [G]

    def mean(self, values: Tensor) -> Tensor:
        """[G] weighted mean; 0 for a group in which no row counts."""
        return self._sum(self.weights * values) / self.totals.where(self.totals > 0, 1.0)

    def dead(self, values: Tensor) -> Tensor:
        """[G] bool: the rewards of all rows that count are equal."""
        counts = self.weights > 0
        high = self._extreme(values.where(counts, -torch.inf), "amax")
        low = self._extreme(values.where(counts, torch.inf), "amin")
        size = self._extreme(values.abs().where(counts, 0.0), "amax")
        return high - low <= DEAD_SPREAD * size

    def _sum(self, values: Tensor) -> Tensor:
        sums = torch.zeros(self._count(), dtype=torch.float64)
        return sums.index_add_(0, self.index, values)

    def _extreme(self, values: Tensor, reduce: Literal["amax", "amin"]) -> Tensor:
        start = torch.zeros(self._count(), dtype=torch.float64)
        return start.scatter_reduce_(0, self.index, values, reduce, include_self=False)

    def _count(self) -> int:
        return int(self.index.max()) + 1 if len(self.index) else 0


def check_finite(rewards: Tensor, weights: Tensor, group_ids: Sequence[str]) -> None:
    """Raises RewardError (6003) if the reward of a row that counts is not finite."""
    bad = ((weights > 0) & ~rewards.detach().isfinite().cpu()).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"the reward of row {bad[0]} (group {group_ids[bad[0]]!r}) is {rewards[bad[0]].item()}, and {len(bad)} of "
            f"{len(rewards)} rewards are not finite: a scorer must return a finite number, or the row weight 0",
            code=6003,
        )


def _metrics(advantages: Tensor, weights: Tensor, dead: Tensor, groups: Groups) -> Metrics:
    present = groups.totals > 0
    num_dead, num_groups = float((dead & present).sum()), float(present.sum())
    return {
        "rollout/zero_std_group_ratio": Metric(num_dead, num_groups, "mean"),
        "rollout/adv_abs_mean": Metric(float((weights * advantages.abs()).sum()), float(weights.sum()), "mean"),
    }
