"""Estimators: from the rewards of a step to advantages and weights. They run on the driver, in float64.

`Estimator` weighs, standardises, whitens, clips and selects. A subclass says how one reward is standardised:
`GroupAdvantage` by its group or the batch, `RunningAdvantage` by the prompt's earlier rewards, `BestOfGroup` by rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from unirl.algorithms.shared.checks import check_above, check_key
from unirl.algorithms.shared.groups import Groups, Selection
from unirl.config.errors import InvalidScoreError, InvalidValueError, did_you_mean
from unirl.types.protocols import State
from unirl.types.results import Metric, Metrics, merge
from unirl.types.rollout_resp import AdvantageResult, Scores
from unirl.types.rows import rows_by_key

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

TOTAL_REWARD = "total"
"""The name of the combined reward."""


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A weight that changes over the run: linear between points, constant before the first and after the last."""

    points: tuple[tuple[float, float], ...]
    """[progress in 0..1, weight] in order; two points at one progress make a jump."""

    def __post_init__(self) -> None:
        places = [0.0, *(place for place, _ in self.points), 1.0]
        if not self.points or places != sorted(places) or not all(math.isfinite(weight) for _, weight in self.points):
            raise InvalidValueError(
                f"Ramp.points must be [progress, weight] pairs, progress rising within 0..1 and weights finite, "
                f"got {[list(point) for point in self.points]}; such as [[0, 1.0], [0.5, 0.2]]"
            )

    def at(self, progress: float) -> float:
        """The weight at `progress` of the run."""
        passed = [point for point in self.points if point[0] <= progress]
        ahead = [point for point in self.points if point[0] > progress]
        if not passed or not ahead:
            return (passed or ahead[:1])[-1][1]
        (start, low), (end, high) = passed[-1], ahead[0]
        return low + (high - low) * (progress - start) / (end - start)


class WeightedReward(NamedTuple):
    """One reward, to be standardised separately, and its weight."""

    name: str
    weight: float
    values: Tensor  # [B] float64, 0 in rows of weight 0


class Standardized(NamedTuple):
    """One reward relative to its baseline and scale."""

    values: Tensor  # [B] float64
    all_equal: Tensor  # [B] bool, the rewards that the row is compared with are all equal
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Estimator(ABC):
    """Weighs rewards, standardises, whitens, clips and selects. Subclasses write `standardize`.

    A row that is compared with equal rewards only has the advantage 0, exactly.
    """

    weights: Mapping[str, Ramp | float] = field(default_factory=dict)
    """Weight of each component reward over the run. Empty = the total that the reward made with its own weights."""
    combine: Literal["rewards", "advantages"] = "rewards"
    """The weights apply to the rewards, or the separate advantage of each (GDPO, arXiv:2601.05242; MixGRPO)."""
    whiten: bool = False
    """Finally normalise all rows together to mean 0 and std 1 (REINFORCE++, arXiv:2501.03262; GDPO)."""
    unbiased: bool = False
    """Divide variances by n - 1 (DanceGRPO, TRL, verl) instead of n (Flow-GRPO, DDPO)."""
    clip: float | None = 5.0
    """Bound on |A|; null = none."""
    eps: float = 1e-6
    """Added to every standard deviation before dividing by it."""
    select: Selection = field(default_factory=Selection)
    """Which of the scored rows are trained."""

    def __post_init__(self) -> None:
        check_above(0.0, "write null for no bound", "advantage", clip=self.clip)
        check_above(0.0, "1e-6 is usual", "advantage", eps=self.eps)
        if self.combine == "advantages" and not self.weights:
            raise InvalidValueError(
                "advantage.combine=advantages needs advantage.weights, one per component reward, such as {ocr: 1.0}"
            )
        infinite = [f"{k}={w}" for k, w in self.weights.items() if not isinstance(w, Ramp) and not math.isfinite(w)]
        if infinite:
            raise InvalidValueError(f"advantage.weights must be finite numbers or ramps, got {', '.join(infinite)}")

    @abstractmethod
    def standardize(self, reward: WeightedReward, groups: Groups, scores: Scores) -> Standardized:
        """One reward relative to its baseline and scale. Values in rows of weight 0 are finite and ignored."""

    def __call__(self, scores: Scores) -> AdvantageResult:
        """Advantages and weights of all rows.

        Raises InvalidScoreError if the reward of a row with weight > 0 is not finite.
        """
        groups = Groups.of(scores.group_ids, scores.weight.detach().double().cpu())
        total = finite_rewards(TOTAL_REWARD, scores.total, groups, scores)
        rewards = self._rewards(total, groups, scores)
        standardized = [self.standardize(reward, groups, scores) for reward in rewards]
        raw, all_equal = self._combined(rewards, standardized, groups)
        trained, metrics = self.select(raw, [reward.values for reward in rewards], total, groups)
        advantages = raw if self.clip is None else raw.clamp(-self.clip, self.clip)
        own_metrics = merge(each.metrics for each in standardized)
        return AdvantageResult(
            advantages=advantages.where(trained, 0.0).float(),
            weight=scores.weight.where(trained.to(scores.weight.device), 0.0),
            metrics=own_metrics | metrics | _metrics(advantages, all_equal, groups),
        )

    def _rewards(self, total: Tensor, groups: Groups, scores: Scores) -> list[WeightedReward]:
        """The rewards to standardise: the total, the weighted sum of components, or every component."""
        if not self.weights:
            return [WeightedReward(TOTAL_REWARD, 1.0, total)]
        components = [self._component(name, groups, scores) for name in self.weights]
        if self.combine == "advantages":
            return components
        weighted_total = torch.stack([reward.weight * reward.values for reward in components]).sum(0)
        return [WeightedReward(TOTAL_REWARD, 1.0, weighted_total)]

    def _component(self, name: str, groups: Groups, scores: Scores) -> WeightedReward:
        if name not in scores.components:
            known = sorted(scores.components)
            raise InvalidValueError(
                f"advantage.weights.{name} names no component reward.{did_you_mean(name, known)} "
                f"The reward gives {', '.join(known) or 'a total only'}"
            )
        weight = self.weights[name]
        now = weight.at(scores.progress) if isinstance(weight, Ramp) else weight
        return WeightedReward(name, now, finite_rewards(name, scores.components[name], groups, scores))

    def _combined(
        self, rewards: list[WeightedReward], standardized: list[Standardized], groups: Groups
    ) -> tuple[Tensor, Tensor]:
        """[B] advantages, and [B] bool: every reward with a weight other than 0 has equal values only."""
        pairs = list(zip(rewards, standardized, strict=True))
        all_equal = torch.stack([each.all_equal | (reward.weight == 0) for reward, each in pairs])
        values = torch.stack([reward.weight * each.values for reward, each in pairs])
        advantages = values.where(~all_equal, 0.0).sum(0)
        if self.whiten:
            batch = Groups.one(groups.weights)
            std = batch.std(advantages, self.unbiased) + self.eps
            advantages = (advantages - batch.mean(advantages)[batch.index]) / std[batch.index]
        return advantages.where(groups.valid & ~all_equal.all(0), 0.0), all_equal.all(0)


def finite_rewards(name: str, rewards: Shaped[Tensor, "B"], groups: Groups, scores: Scores) -> Float[Tensor, "B"]:
    """[B] float64 rewards on the CPU, 0 in rows of weight 0.

    Raises InvalidScoreError if the reward of a row with weight > 0 is not finite.
    """
    values = rewards.detach().double().cpu()
    bad = (groups.valid & ~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        which = "" if name == TOTAL_REWARD else f"{name} "
        raise InvalidScoreError(
            f"the {which}reward of row {bad[0]} (group {scores.group_ids[bad[0]]!r}) is {values[bad[0]].item()}, and "
            f"{len(bad)} of {len(values)} rewards are not finite: a scorer must return a finite number, or the row "
            "weight 0"
        )
    return values.where(groups.valid, 0.0)


def _metrics(advantages: Tensor, all_equal: Tensor, groups: Groups) -> Metrics:
    present = groups.totals > 0
    num_equal = (groups.mean(all_equal.double()) == 1.0) & present
    weights = groups.weights
    return {
        "rollout/zero_std_group_ratio": Metric(float(num_equal.sum()), float(present.sum()), "mean"),
        "rollout/adv_abs_mean": Metric(float((weights * advantages.abs()).sum()), float(weights.sum()), "mean"),
    }


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Estimator):
    """A = clip((r - mean) / (std + eps)), mean over the group (GRPO, arXiv:2402.03300, section 4.1).

    Population std, eps outside the root. A group whose rewards are all equal gives exactly 0 and is counted in
    `rollout/zero_std_group_ratio`. `docs/algorithms/advantages.md` lists the keys for Dr.GRPO, RLOO, REINFORCE++, GDPO
    and others.
    """

    std: Literal["group", "batch", "none"] = "group"
    """The divisor: std of the group, of all rewards of the step (Flow-GRPO), or none (Dr.GRPO: centred only)."""
    scope: Literal["group", "global"] = "group"
    """Centre each group by its own mean, or all rows by their common mean."""
    leave_one_out: bool = False
    """Centre a row by the mean of the other rows (RLOO, arXiv:2402.14740): n / (n - 1) times the centred reward."""
    trim: float = 0.0
    """Fraction of rows at each end, int(n trim) of them, that mean and std ignore as outliers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key(0.0 <= self.trim < 0.5, "advantage.trim", "lie in [0, 0.5)", self.trim, "0 leaves out nothing")

    def leaving_one_out(self) -> GroupAdvantage:
        """This estimator with `SIBLING_BASELINE`: A = r - mean of the other rewards of the group."""
        return replace(self, **SIBLING_BASELINE)

    def standardize(self, reward: WeightedReward, groups: Groups, scores: Scores) -> Standardized:
        values, batch = reward.values, Groups.one(groups.weights)
        centre = batch if self.scope == "global" else groups
        inner = centre.trimmed(values, self.trim)
        all_equal = centre.all_equal(values)[centre.index]
        advantages = values - inner.mean(values)[inner.index]
        if self.leave_one_out:
            advantages = advantages * inner.others()
        if self.std != "none":
            scale = (batch if self.std == "batch" else centre).trimmed(values, self.trim)
            advantages = advantages / (scale.std(values, self.unbiased)[scale.index] + self.eps)
            # If trimming removes the only different reward, the std of the others is 0 and gives no scale.
            all_equal = all_equal | scale.all_equal(values)[scale.index]
        return Standardized(advantages, all_equal, {})


SIBLING_BASELINE: Mapping[str, Any] = {
    "std": "none",
    "scope": "group",
    "leave_one_out": True,
    "trim": 0.0,
    "clip": None,
}
"""The settings of `GroupAdvantage` that make it RLOO (arXiv:2402.14740)."""

Histories = dict[str, deque[float]]
"""Prompt id -> its last rewards, oldest first."""


@dataclass(frozen=True, kw_only=True)
class RunningAdvantage(Estimator):
    """A = clip((r - mean) / (std + eps)), mean and std over the prompt's last rewards, those of this step included.

    DDPO (arXiv:2305.13301, section 5): for few samples per prompt and step. A prompt with fewer than `min_count`
    rewards so far uses mean and std of all rewards of the step. Histories are kept per track, reward and prompt, and
    are part of a checkpoint.
    """

    buffer_size: int = 32
    """Rewards kept per prompt. If one step has more, its last rows are kept."""
    min_count: int = 16
    """Rewards that a prompt needs before its own history is used."""
    _history: dict[str, Histories] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_count <= self.buffer_size:
            raise InvalidValueError(
                f"advantage.min_count must lie in 1..buffer_size={self.buffer_size}, got {self.min_count}: "
                "a longer history is never reached"
            )

    def standardize(self, reward: WeightedReward, groups: Groups, scores: Scores) -> Standardized:
        histories = self._history.setdefault(f"{scores.track}/{reward.name}", {})
        batch = Groups.one(groups.weights)
        mean = batch.mean(reward.values)[batch.index]
        std = batch.std(reward.values, self.unbiased)[batch.index]
        all_equal = batch.all_equal(reward.values)[batch.index]
        own = torch.zeros_like(all_equal)
        valid = groups.valid.nonzero().flatten().tolist()
        for prompt, members in rows_by_key(prompt_id(scores.group_ids[row]) for row in valid).items():
            rows = [valid[member] for member in members]
            history = histories.setdefault(prompt, deque(maxlen=self.buffer_size))
            history.extend(reward.values[rows].tolist())
            if len(history) >= self.min_count:
                past = torch.tensor(list(history), dtype=torch.float64)
                whole = Groups.one(torch.ones_like(past))
                mean[rows], std[rows] = whole.mean(past), whole.std(past, self.unbiased)
                all_equal[rows] = whole.all_equal(past)
                own[rows] = True
        own_history = Metric(float(own.sum()), float(groups.valid.sum()), "mean")
        advantages = (reward.values - mean) / (std + self.eps)
        return Standardized(advantages, all_equal, {"rollout/own_history_ratio": own_history})

    def state_dict(self) -> State:
        """The histories as lists."""
        return {
            name: {prompt: list(history) for prompt, history in histories.items()}
            for name, histories in self._history.items()
        }

    def load_state_dict(self, state: State) -> None:
        """The inverse of `state_dict`."""
        self._history.clear()
        for name, histories in state.items():
            self._history[name] = {prompt: deque(past, self.buffer_size) for prompt, past in histories.items()}


def prompt_id(group_id: str) -> str:
    """The prompt's id in `{prompt id}@{epoch}`, even if more text follows the epoch."""
    return group_id.rpartition("@")[0] or group_id


@dataclass(frozen=True, kw_only=True)
class BestOfGroup(Estimator):
    """A = 1 for the best sample of each group; the others get weight 0. With DiffusionRWR(weighting=advantage): SFT.

    If several samples are equally good, the first is used. A group whose rewards are all equal is left out.
    """

    def standardize(self, reward: WeightedReward, groups: Groups, scores: Scores) -> Standardized:
        best = groups.ranks(-reward.values) == 0
        return Standardized(best.double(), groups.all_equal(reward.values)[groups.index], {})

    def __call__(self, scores: Scores) -> AdvantageResult:
        result = super().__call__(scores)
        trained = (result.advantages > 0).to(result.weight.device)
        return replace(result, weight=result.weight.where(trained, 0.0))
