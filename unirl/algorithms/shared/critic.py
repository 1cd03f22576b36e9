"""What losses with a value head share: their keys, what a row earns, and the loss of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.algorithms.base import Stage, StageAlgorithm
from unirl.algorithms.shared.packed import row_of
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import Anchor, Needs
from unirl.types.results import Metric, Metrics
from unirl.types.rollout_resp import RolloutTrack

VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True)
class GAEInputs:
    """What a value head is judged by. What stands at a step that does not exist is never read, finite or not."""

    rewards: Tensor  # [B, S]
    values: Tensor  # [B, S] V of the state before the step
    next_values: Tensor  # [B, S] V of the true state after it; 0 where the episode terminated
    ends: Tensor  # [B, S] bool, the episode terminated or was cut off after this step
    mask: Tensor  # [B, S] bool, False = no step: padding, a token that was not sampled

    @staticmethod
    def from_rows(rewards: Tensor, values: Tensor, mask: Tensor, last_values: Tensor | None = None) -> GAEInputs:
        """Rows [B, S] that are one episode each: the state after a step is the one before the next step that exists.

        Args:
            last_values: [B] V of the state after the last step; absent = 0, the end.
        """
        existing = CompactSteps.of(mask)
        following = pad(existing.first(values, 0.0)[:, 1:], (0, min(1, values.shape[1])))
        if last_values is not None:
            following = torch.where(existing.is_last, last_values[:, None], following)
        return GAEInputs(rewards, values, existing.back(following), torch.zeros_like(mask), mask)


class StepCredit(NamedTuple):
    """What each step was worth; 0 where there is no step."""

    advantages: Tensor  # [B, S]
    returns: Tensor  # [B, S] A + V, what the value head should have said: taken before any whitening


@torch.no_grad()
def gae(steps: GAEInputs, gamma: float, lam: float) -> StepCredit:
    """The exponentially weighted sum of TD errors. Schulman et al. 2015, eq. 16 (arXiv:1506.02438).

    A_t = delta_t + gamma lam A_{t+1} (0 after an end),  delta_t = r_t + gamma V'_t - V_t

    lam = 1 gives the discounted return minus V, lam = 0 the TD error.
    """
    existing = CompactSteps.of(steps.mask)
    sums = existing.first(steps.rewards + gamma * steps.next_values - steps.values, 0.0)
    carry = gamma * lam * existing.first(~steps.ends, False).to(sums.dtype)
    hop = 1
    while hop < sums.shape[1]:
        # sums[t] holds the terms of t ... t + hop - 1, and carry[t] the discount of the one that comes next.
        sums = sums + pad(carry[:, :-hop] * sums[:, hop:], (0, hop))
        carry = pad(carry[:, :-hop] * carry[:, hop:], (0, hop))
        hop *= 2
    advantages = existing.back(sums)
    return StepCredit(advantages, torch.where(steps.mask, advantages + steps.values, 0.0))


@dataclass(frozen=True)
class CompactSteps:
    """The steps of each row that exist, moved to its front in their order."""

    order: Tensor  # [B, S] int64, which step stands at each place
    held: Tensor  # [B, S] bool, the place holds a step that exists

    @staticmethod
    def of(mask: Tensor) -> CompactSteps:
        order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return CompactSteps(order, mask.gather(1, order))

    @property
    def is_last(self) -> Tensor:
        """[B, S] bool, the place holds the last step of its row."""
        return self.held & ~pad(self.held[:, 1:], (0, min(1, self.held.shape[1])))

    def first(self, values: Tensor, absent: float) -> Tensor:
        """[B, S] values by place; `absent` behind a row's last step, whatever stood at steps that do not exist."""
        return torch.where(self.held, values.gather(1, self.order), absent)

    def back(self, placed: Tensor) -> Tensor:
        """[B, S] by step, from values by place; 0 where no step exists."""
        return torch.zeros_like(placed).scatter(1, self.order, torch.where(self.held, placed, 0.0))


def outcome_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, S] the reward of a whole row [B] on its last step that exists, 0 on the others."""
    later = mask.flip(1).cumsum(1).flip(1)
    return torch.where(mask & (later == 1), rewards[:, None], 0.0)


@dataclass(frozen=True)
class DenseLayout:
    """Where the entries of packed rows stand in a dense [B, L]."""

    row: Tensor  # [sum L] int64
    place: Tensor  # [sum L] int64
    shape: tuple[int, int]

    @staticmethod
    def of(offsets: Tensor, device: torch.device | None = None) -> DenseLayout:
        """From row boundaries [B + 1]; rows may be empty.

        Args:
            device: of the values to be laid out; absent = that of the boundaries.
        """
        lengths, row = offsets.diff(), row_of(offsets)
        place = torch.arange(len(row), device=offsets.device) - offsets[:-1][row]
        shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)
        return DenseLayout(row.to(device), place.to(device), shape)

    def dense(self, packed: Tensor) -> Tensor:
        """[B, L] from [sum L], 0 or False behind a row's end."""
        dense = packed.new_zeros(self.shape)
        dense[self.row, self.place] = packed
        return dense

    def packed(self, dense: Tensor) -> Tensor:
        """[sum L] from [B, L]."""
        return dense[self.row, self.place]


@dataclass(frozen=True)
class Moments:
    """Sums over elements that count, in float64: add those of micro-batches and ranks, then whiten by the whole."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @staticmethod
    def of(values: Tensor, mask: Tensor) -> Moments:
        kept = torch.where(mask, values.double(), 0.0)
        return Moments(mask.double().sum(), kept.sum(), kept.square().sum())

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1.0)

    @property
    def variance(self) -> Tensor:
        """Unbiased; 0 for fewer than two elements."""
        return (self.squares - self.count * self.mean.square()).clamp(min=0.0) / (self.count - 1.0).clamp(min=1.0)


def whitened(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) where `mask`, else 0; dtype of `values`."""
    centred = (values.double() - moments.mean) * torch.rsqrt(moments.variance + VARIANCE_FLOOR)
    return torch.where(mask, centred, 0.0).to(values.dtype)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """Squared error per element, to be summed by the caller. The worse of V and of V kept within `clip` of V_old.

    L = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    The clip is PPO's in its first implementations; Engstrom et al. 2020 (arXiv:2005.12729), section 3.

    Args:
        values, old_values, returns: any one shape; the last two are detached here.
        clip: absent = no clip.
    """
    returns, old = returns.detach(), old_values.detach()
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (values.clamp(old - clip, old + clip) - returns).square())
    return 0.5 * error


@torch.no_grad()
def value_metrics(values: Tensor, returns: Tensor, losses: Tensor, weights: Tensor) -> Metrics:
    """How well a value head predicts; of the two spreads, over all ranks, `explained_variance` makes one number.

    Args:
        values, returns, losses, weights: one shape; elements of weight 0 count nowhere.
    """
    known = torch.where(weights > 0, returns, 0.0)
    error = torch.where(weights > 0, returns - values, 0.0)
    return {
        "train/value_loss": mean_metric(losses, weights),
        "train/value_error_std": Metric.std(error, weights),
        "train/return_std": Metric.std(known, weights),
    }


def explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """1 - Var(R - V) / Var(R) from the spreads of `value_metrics`; nothing without a value head or a spread.

    1 = V knows every return, 0 = V knows no more than their mean, below 0 = less than that.
    """
    spread = metrics.get("train/return_std", 0.0)
    if not spread > 0.0:
        return {}
    return {"train/explained_variance": 1.0 - (metrics["train/value_error_std"] / spread) ** 2}


OLD_VALUE = "old_value"


@dataclass(frozen=True, kw_only=True)
class Critic(StageAlgorithm[Stage]):
    """The half of a loss that a value head adds; the first base of a loss, before that of the policy.

    A row earns its outcome after its last step and nothing before. GAE (arXiv:1506.02438, eq. 16) makes an advantage of
    each step out of that and the values from before the first update; the head learns what each step was worth.
    """

    gamma: float = 1.0
    """Discount per trained step."""
    lam: float = 0.95
    """lambda of GAE: 1 waits for the outcome, 0 believes the value head."""
    outcome: Literal["advantages", "rewards"] = "advantages"
    """What a sample earns: the driver's normalised advantage, or the raw reward (on a scale that V must then learn)."""
    vf_coef: float = 0.5
    """Of the value loss. The head has weights and an optimizer group of its own."""
    value_clip: float | None = 0.2
    """How far V may move from V_old in the loss, in units of the outcome; absent = no clip."""

    def check_critic(self) -> None:
        """Raises ConfigError for a key out of range."""
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise InvalidValueError(f"algorithm.{name} must lie in [0, 1], got {value}; 1 is usual")
        if not self.vf_coef > 0:
            raise InvalidValueError(
                f"algorithm.vf_coef must be > 0, got {self.vf_coef}; without a value head, use DiffusionGRPO or ARGRPO"
            )
        if self.value_clip is not None and not self.value_clip > 0:
            raise InvalidValueError(f"algorithm.value_clip must be > 0, got {self.value_clip}; write null for no clip")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, value=True, advantages=self.outcome == "advantages")

    def anchors(self) -> Mapping[str, Anchor]:
        return {**super().anchors(), OLD_VALUE: Anchor("live", "value")}

    def row_return(self, rows: RolloutTrack) -> Tensor:
        """[B] the outcome of each row."""
        outcome = rows.rewards if self.outcome == "rewards" else rows.advantages
        assert outcome is not None, "training needs rewards and advantages: compute_advantages comes before train_track"
        return outcome

    def value_losses(self, values: Tensor, old: Tensor, returns: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
        """The head's loss per element, before vf_coef, and how well it predicts.

        Args:
            values, old, returns, weights: one shape; finite. Elements of weight 0 are logged nowhere.
        """
        losses = value_loss(values, old, returns, self.value_clip)
        metrics = value_metrics(values, returns, losses, weights)
        if self.value_clip is not None:
            with torch.no_grad():
                moved = ((values - old).abs() > self.value_clip).float()
            metrics["train/value_clip_fraction"] = mean_metric(moved, weights)
        return losses, metrics
