"""Advantages from the rewards of one step: groups, or the batch, as the measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unirl.algorithms.shared.estimator import Estimator, Reward, Standardized
from unirl.algorithms.shared.groups import Groups
from unirl.config.errors import InvalidValueError
from unirl.types.rollout_resp import Scores


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Estimator):
    """A = clip((r - mean) / (std + eps)), mean over the group (GRPO, arXiv:2402.03300, section 4.1).

    Population std, eps outside the root. A group whose rewards are all equal gives exactly 0 and is counted.
    `docs/algorithms/advantages.md` says which keys make Dr.GRPO, RLOO, REINFORCE++, GDPO and others.
    """

    std: Literal["group", "batch", "none"] = "group"
    """The divisor: of the group, of all rewards of the step (Flow-GRPO), or none (Dr.GRPO: centred only)."""
    scope: Literal["group", "global"] = "group"
    """What is centred: each group by its own mean, or all rows as if they were one group."""
    leave_one_out: bool = False
    """Centre a row by the mean of the others (RLOO, arXiv:2402.14740): n / (n - 1) times as much."""
    trim: float = 0.0
    """Share of rows at either end that mean and std leave out, int(n trim) of them, so that outliers move neither."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.trim < 0.5:
            raise InvalidValueError(f"advantage.trim must lie in [0, 0.5), got {self.trim}; 0 leaves out nothing")

    def standardize(self, reward: Reward, groups: Groups, scores: Scores) -> Standardized:
        values, batch = reward.values, Groups.one(groups.weights)
        centre = batch if self.scope == "global" else groups
        inner = centre.trimmed(values, self.trim)
        dead = centre.dead(values)[centre.index]
        advantages = values - inner.mean(values)[inner.index]
        if self.leave_one_out:
            advantages = advantages * inner.others()
        if self.std != "none":
            scale = (batch if self.std == "batch" else centre).trimmed(values, self.trim)
            advantages = advantages / (scale.std(values, self.unbiased)[scale.index] + self.eps)
            # One outlier among equals: the trimmed std is 0, so there is nothing to measure it by.
            dead = dead | scale.dead(values)[scale.index]
        return Standardized(advantages, dead, {})
