"""Advantages from the rewards of one step: groups, or the batch, as the measure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unirl.algorithms.shared.groups import Groups, Selection
from unirl.config.errors import InvalidScoreError, InvalidValueError, did_you_mean
from unirl.types.protocols import State
from unirl.types.results import Metric, Metrics, merge
from unirl.types.rollout_resp import AdvantageResult, Scores

TOTAL = "total"
"""The name of the reward that several make together."""


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


class Reward(NamedTuple):
    """One reward that is standardised by itself."""

    name: str
    weight: float
    values: Tensor  # [B] float64, 0 where the row does not count


class Standardized(NamedTuple):
    """One reward relative to what was to be expected of it."""

    values: Tensor  # [B] float64
    dead: Tensor  # [B] bool: nothing can be told, because the rewards it is compared with are all equal
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Estimator(ABC):
    """Weigh rewards, standardise, whiten, clip, select; an estimator says how one reward is standardised.

    All in float64. Where nothing can be told apart the advantage is exactly 0, and the group is counted.
    """

    weights: Mapping[str, Ramp | float] = field(default_factory=dict)
    """Weight of each component reward over the run. Empty = the total that the reward made with its own weights."""
    combine: Literal["rewards", "advantages"] = "rewards"
    """What is weighed: the rewards, or the advantage that each has by itself (GDPO, arXiv:2601.05242; MixGRPO)."""
    whiten: bool = False
    """Then bring all rows together to mean 0 and std 1 (REINFORCE++, arXiv:2501.03262; GDPO)."""
    unbiased: bool = False
    """Divide variances by n - 1 (DanceGRPO, TRL, verl) instead of n (Flow-GRPO, DDPO)."""
    clip: float | None = 5.0
    """Bound on |A|; absent = none."""
    eps: float = 1e-6
    """Added to every std that divides."""
    select: Selection = field(default_factory=Selection)
    """Which of the scored rows are trained."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise InvalidValueError(f"advantage.clip must be > 0, got {self.clip}; write null for no bound")
        if self.eps <= 0:
            raise InvalidValueError(f"advantage.eps must be > 0, got {self.eps}")
        if self.combine == "advantages" and not self.weights:
            raise InvalidValueError(
                "advantage.combine=advantages needs advantage.weights, one per component reward, such as {ocr: 1.0}"
            )
        wild = [f"{k}={w}" for k, w in self.weights.items() if not isinstance(w, Ramp) and not math.isfinite(w)]
        if wild:
            raise InvalidValueError(f"advantage.weights must be finite numbers or ramps, got {', '.join(wild)}")

    @abstractmethod
    def standardize(self, reward: Reward, groups: Groups, scores: Scores) -> Standardized:
        """One reward relative to its baseline and scale. Rows that do not count may hold anything finite."""

    def __call__(self, scores: Scores) -> AdvantageResult:
        """Raises RewardError (6003) if a reward of a row that counts is not finite."""
        groups = Groups.of(scores.group_ids, scores.weight.detach().double().cpu())
        total = finite(TOTAL, scores.total, groups, scores)
        rewards = self._rewards(total, groups, scores)
        parts = [self.standardize(reward, groups, scores) for reward in rewards]
        raw, dead = self._combined(rewards, parts, groups)
        trained, metrics = self.select(raw, [reward.values for reward in rewards], total, groups)
        advantages = raw if self.clip is None else raw.clamp(-self.clip, self.clip)
        return AdvantageResult(
            advantages=advantages.where(trained, 0.0).float(),
            weight=scores.weight.where(trained.to(scores.weight.device), 0.0),
            metrics=merge(part.metrics for part in parts) | metrics | _metrics(advantages, dead, groups),
        )

    def _rewards(self, total: Tensor, groups: Groups, scores: Scores) -> list[Reward]:
        """What is standardised: the total, the weighted sum of components, or every component."""
        if not self.weights:
            return [Reward(TOTAL, 1.0, total)]
        parts = [self._component(name, groups, scores) for name in self.weights]
        if self.combine == "advantages":
            return parts
        mixed = torch.stack([part.weight * part.values for part in parts]).sum(0)
        return [Reward(TOTAL, 1.0, mixed)]

    def _component(self, name: str, groups: Groups, scores: Scores) -> Reward:
        if name not in scores.components:
            known = sorted(scores.components)
            raise InvalidValueError(
                f"advantage.weights.{name} names no component reward.{did_you_mean(name, known)} "
                f"The reward gives {', '.join(known) or 'a total only'}"
            )
        weight = self.weights[name]
        now = weight.at(scores.progress) if isinstance(weight, Ramp) else weight
        return Reward(name, now, finite(name, scores.components[name], groups, scores))

    def _combined(self, rewards: list[Reward], parts: list[Standardized], groups: Groups) -> tuple[Tensor, Tensor]:
        """([B] advantages, [B] bool: no reward that weighs anything tells the row from others)."""
        dead = torch.stack([part.dead | (reward.weight == 0) for reward, part in zip(rewards, parts, strict=True)])
        values = torch.stack([reward.weight * part.values for reward, part in zip(rewards, parts, strict=True)])
        advantages = values.where(~dead, 0.0).sum(0)
        if self.whiten:
            batch = Groups.one(groups.weights)
            std = batch.std(advantages, self.unbiased) + self.eps
            advantages = (advantages - batch.mean(advantages)[batch.index]) / std[batch.index]
        return advantages.where(groups.valid & ~dead.all(0), 0.0), dead.all(0)


def finite(name: str, rewards: Tensor, groups: Groups, scores: Scores) -> Tensor:
    """[B] float64 on the CPU, 0 where the row does not count.

    Raises RewardError (6003) if the reward of a row that counts is not finite.
    """
    values = rewards.detach().double().cpu()
    bad = (groups.valid & ~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        which = "" if name == TOTAL else f"{name} "
        raise InvalidScoreError(
            f"the {which}reward of row {bad[0]} (group {scores.group_ids[bad[0]]!r}) is {values[bad[0]].item()}, and "
            f"{len(bad)} of {len(values)} rewards are not finite: a scorer must return a finite number, or the row "
            "weight 0"
        )
    return values.where(groups.valid, 0.0)


def _metrics(advantages: Tensor, dead: Tensor, groups: Groups) -> Metrics:
    present = groups.totals > 0
    num_dead = (groups.mean(dead.double()) == 1.0) & present
    weights = groups.weights
    return {
        "rollout/zero_std_group_ratio": Metric(float(num_dead.sum()), float(present.sum()), "mean"),
        "rollout/adv_abs_mean": Metric(float((weights * advantages.abs()).sum()), float(weights.sum()), "mean"),
    }


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
        dead = centre.all_equal(values)[centre.index]
        advantages = values - inner.mean(values)[inner.index]
        if self.leave_one_out:
            advantages = advantages * inner.others()
        if self.std != "none":
            scale = (batch if self.std == "batch" else centre).trimmed(values, self.trim)
            advantages = advantages / (scale.std(values, self.unbiased)[scale.index] + self.eps)
            # One outlier among equals: the trimmed std is 0, so there is nothing to measure it by.
            dead = dead | scale.all_equal(values)[scale.index]
        return Standardized(advantages, dead, {})


Histories = dict[str, deque[float]]
"""Prompt id -> its last rewards, oldest first."""


@dataclass(frozen=True, kw_only=True)
class RunningAdvantage(Estimator):
    """A = clip((r - mean) / (std + eps)), mean and std over the prompt's last rewards, those of this step included.

    DDPO (arXiv:2305.13301, section 5). A prompt with fewer than `min_count` rewards so far is measured by all rewards
    of the step instead. Histories are kept per track, reward and prompt, and are part of a checkpoint.
    """

    buffer_size: int = 32
    """Rewards remembered per prompt; of more than that in one step, the last rows."""
    min_count: int = 16
    """Rewards a prompt needs before its own history is the measure."""
    _history: dict[str, Histories] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_count <= self.buffer_size:
            raise InvalidValueError(
                f"advantage.min_count must lie in 1..buffer_size={self.buffer_size}, got {self.min_count}: "
                "a longer history is never reached"
            )

    def standardize(self, reward: Reward, groups: Groups, scores: Scores) -> Standardized:
        histories = self._history.setdefault(f"{scores.track}/{reward.name}", {})
        batch = Groups.one(groups.weights)
        mean = batch.mean(reward.values)[batch.index]
        std = batch.std(reward.values, self.unbiased)[batch.index]
        dead = batch.all_equal(reward.values)[batch.index]
        own = torch.zeros_like(dead)
        for prompt, rows in _rows_by_prompt(scores, groups).items():
            history = histories.setdefault(prompt, deque(maxlen=self.buffer_size))
            history.extend(reward.values[rows].tolist())
            if len(history) >= self.min_count:
                past = torch.tensor(list(history), dtype=torch.float64)
                whole = Groups.one(torch.ones_like(past))
                mean[rows], std[rows], dead[rows] = (
                    whole.mean(past),
                    whole.std(past, self.unbiased),
                    whole.all_equal(past),
                )
                own[rows] = True
        measured = Metric(float(own.sum()), float(groups.valid.sum()), "mean")
        advantages = (reward.values - mean) / (std + self.eps)
        return Standardized(advantages, dead, {"rollout/own_history_ratio": measured})

    def state_dict(self) -> State:
        """The histories, as lists."""
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
    """The prompt's id in `{prompt id}@{epoch}`, also where more follows the epoch."""
    return group_id.rpartition("@")[0] or group_id


def _rows_by_prompt(scores: Scores, groups: Groups) -> dict[str, list[int]]:
    """The rows that count, by prompt."""
    rows: dict[str, list[int]] = {}
    for i in groups.valid.nonzero().flatten().tolist():
        rows.setdefault(prompt_id(scores.group_ids[i]), []).append(i)
    return rows


@dataclass(frozen=True, kw_only=True)
class BestOfGroup(Estimator):
    """A = 1 for the best sample of each group; the others are not trained. With DiffusionRWR(weighting=advantage): SFT.

    Of several that are equally good the first is taken; a group whose rewards are all equal is left out.
    """

    def standardize(self, reward: Reward, groups: Groups, scores: Scores) -> Standardized:
        best = groups.ranks(-reward.values) == 0
        return Standardized(best.double(), groups.all_equal(reward.values)[groups.index], {})

    def __call__(self, scores: Scores) -> AdvantageResult:
        result = super().__call__(scores)
        trained = (result.advantages > 0).to(result.weight.device)
        return replace(result, weight=result.weight.where(trained, 0.0))
