"""The critic of PPO: generalised advantage estimation (GAE), the loss of the value head, and the settings of both.

    steps = GAEInputs.from_rows(outcome_rewards(rewards, mask), values, mask)    one episode per row: tokens, denoising
    steps = GAEInputs(rewards, values, next_values, ends, mask)                  environments, which give next values
    credit = gae(steps, gamma, lam)

GAE works on dense rows [B, S]. `layout = DenseLayout.of(offsets)` converts packed rows: `layout.dense(values)` before,
`layout.packed(credit.advantages)` after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.algorithms.base import SegmentT, StageAlgorithm, StageT
from unirl.algorithms.shared.checks import check_above, check_key
from unirl.algorithms.shared.packed import row_of
from unirl.algorithms.shared.surrogate import element_metrics
from unirl.types.protocols import Anchor, Needs
from unirl.types.results import Metrics
from unirl.types.rollout_resp import RolloutTrack

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

OLD_VALUE = "old_value"
"""The anchor with the values from before the first update."""

OutcomeSource = Literal["advantages", "rewards"]
"""The value that a row receives at its last step: the advantage from the driver, or the raw reward."""


@dataclass(frozen=True, kw_only=True)
class Critic(StageAlgorithm[StageT, SegmentT]):
    """The recipe keys of a loss with a value head, which learns the return of each step.

    GAE turns the rewards and the old values into one advantage per step.
    """

    gamma: float = 1.0
    """Discount per trained step or token."""
    lam: float = 0.95
    """lambda of GAE: 1 uses the outcome alone, 0 the value of the next step or token alone."""
    vf_coef: float = 0.5
    """Factor of the value loss. The value head has its own weights and optimizer group."""
    value_clip: float | None = 0.2
    """Largest distance of V from V_old in the loss, in units of the reward; null = no clip."""
    value_huber: float | None = None
    """Error of V beyond which the value loss is linear (Huber), in units of the reward; null = squared everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            check_key(0.0 <= value <= 1.0, f"algorithm.{name}", "lie in [0, 1]", value, "1 is usual")
        check_above(0.0, "without a value head, use the GRPO loss of the domain", vf_coef=self.vf_coef)
        check_above(0.0, "write null for no clip", value_clip=self.value_clip)
        check_above(0.0, "write null for the squared error", value_huber=self.value_huber)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, value=True)

    def anchors(self) -> Mapping[str, Anchor]:
        return {**super().anchors(), OLD_VALUE: Anchor("live", "value")}

    def value_losses(
        self,
        values: Float[Tensor, "*elements"],
        old: Float[Tensor, "*elements"],
        returns: Float[Tensor, "*elements"],
        weights: Float[Tensor, "*elements"],
    ) -> tuple[Float[Tensor, "*elements"], Metrics]:
        """The value loss per element, before the factor vf_coef, and its metrics, without elements of weight 0."""
        losses = value_loss(values, old, returns, self.value_clip, self.value_huber)
        clipped = {}
        if self.value_clip is not None:
            clipped["train/value_clip_fraction"] = (values.detach() - old).abs() > self.value_clip
        return losses, value_metrics(values, returns, losses, weights, clipped)


@dataclass(frozen=True, kw_only=True)
class OutcomeCritic(Critic[StageT, SegmentT]):
    """A loss with a value head on rows that return their outcome at the last step, and nothing before."""

    outcome: OutcomeSource = "advantages"
    """Outcome of a row: the driver's normalised advantage, or the raw reward, whose scale V must learn."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, advantages=self.outcome == "advantages")

    def row_return(self, rows: RolloutTrack) -> Float[Tensor, "B"]:
        """[B] the outcome of each row."""
        outcome = rows.rewards if self.outcome == "rewards" else rows.advantages
        assert outcome is not None, "training needs rewards and advantages: compute_advantages comes before train_track"
        return outcome


@dataclass(frozen=True)
class GAEInputs:
    """Inputs of `gae`. Steps outside the mask are never read, even if they are not finite."""

    rewards: Tensor  # [B, S]
    values: Tensor  # [B, S] V of the state before the step
    next_values: Tensor  # [B, S] V of the true state after it; 0 where the episode terminated
    ends: Tensor  # [B, S] bool, True = the episode terminated or was truncated after this step
    mask: Tensor  # [B, S] bool, False = no step: padding, or a token that was not sampled

    @staticmethod
    def from_rows(
        rewards: Float[Tensor, "B S"],
        values: Float[Tensor, "B S"],
        mask: Bool[Tensor, "B S"],
        last_values: Float[Tensor, "B"] | None = None,
    ) -> GAEInputs:
        """Inputs for rows [B, S] of one episode each; a step's next value is the value of the next masked step.

        `last_values` are V of the states after the last steps; None = 0, every episode has ended.
        """
        compact = CompactSteps.of(mask)
        following = pad(compact.to_front(values, 0.0)[:, 1:], (0, min(1, values.shape[1])))
        if last_values is not None:
            is_last = compact.is_step & ~pad(compact.is_step[:, 1:], (0, min(1, values.shape[1])))
            following = torch.where(is_last, last_values[:, None], following)
        return GAEInputs(rewards, values, compact.scatter_back(following), torch.zeros_like(mask), mask)


class StepCredit(NamedTuple):
    """Advantages and returns of steps; 0 outside the mask."""

    advantages: Tensor  # [B, S]
    returns: Tensor  # [B, S] A + V, the target of the value head, before any whitening of A


@torch.no_grad()
def gae(steps: GAEInputs, gamma: float, lam: float) -> StepCredit:
    """The exponentially weighted sum of TD errors. Schulman et al. 2015, eq. 16 (arXiv:1506.02438).

    A_t = delta_t + gamma lam A_{t+1} (0 after an end),  delta_t = r_t + gamma V'_t - V_t

    lam = 1 gives the discounted return minus V, lam = 0 the TD error. The recursion is evaluated in log2(S) doubling
    steps.
    """
    compact = CompactSteps.of(steps.mask)
    sums = compact.to_front(steps.rewards + gamma * steps.next_values - steps.values, 0.0)
    carry = gamma * lam * compact.to_front(~steps.ends, False).to(sums.dtype)
    span = 1
    while span < sums.shape[1]:
        # sums[t] holds the terms of t ... t + span - 1, and carry[t] the discount of the term that comes next.
        sums = sums + pad(carry[:, :-span] * sums[:, span:], (0, span))
        carry = pad(carry[:, :-span] * carry[:, span:], (0, span))
        span *= 2
    advantages = compact.scatter_back(sums)
    return StepCredit(advantages, torch.where(steps.mask, advantages + steps.values, 0.0))


@dataclass(frozen=True)
class CompactSteps:
    """A reordering that moves the masked steps of each row to its front and keeps their order."""

    order: Tensor  # [B, S] int64, the original position of the step at each compact position
    is_step: Tensor  # [B, S] bool, the compact position holds a step of the mask

    @staticmethod
    def of(mask: Bool[Tensor, "B S"]) -> CompactSteps:
        order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return CompactSteps(order, mask.gather(1, order))

    def to_front(self, values: Shaped[Tensor, "B S"], absent: float) -> Shaped[Tensor, "B S"]:
        """[B, S] values in compact order, and `absent` after the last step of a row."""
        return torch.where(self.is_step, values.gather(1, self.order), absent)

    def scatter_back(self, compact: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        """[B, S] values in the original order, from compact order; 0 outside the mask."""
        return torch.zeros_like(compact).scatter(1, self.order, torch.where(self.is_step, compact, 0.0))


def outcome_rewards(rewards: Float[Tensor, "B"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """[B, S] the reward of each row [B] at its last step in the mask, and 0 at the other steps."""
    later = mask.flip(1).cumsum(1).flip(1)
    return torch.where(mask & (later == 1), rewards[:, None], 0.0)


@dataclass(frozen=True)
class DenseLayout:
    """The position of packed values [sum L] in a dense tensor [B, L]."""

    row: Tensor  # [sum L] int64
    place: Tensor  # [sum L] int64, position within the row
    shape: tuple[int, int]

    @staticmethod
    def of(offsets: Int[Tensor, "boundaries"], device: torch.device | None = None) -> DenseLayout:
        """The layout for row boundaries [B + 1] and values on `device` (None: as `offsets`). Rows may be empty."""
        lengths, row = offsets.diff(), row_of(offsets)
        place = torch.arange(len(row), device=offsets.device) - offsets[:-1][row]
        shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)
        return DenseLayout(row.to(device), place.to(device), shape)

    def dense(self, packed: Shaped[Tensor, "sum_L"]) -> Shaped[Tensor, "B L"]:
        """[B, L] from [sum L], with 0 or False after the end of a row."""
        dense = packed.new_zeros(self.shape)
        dense[self.row, self.place] = packed
        return dense

    def packed(self, dense: Shaped[Tensor, "B L"]) -> Shaped[Tensor, "sum_L"]:
        """[sum L] from [B, L]."""
        return dense[self.row, self.place]


def moments(values: Float[Tensor, "*elements"], mask: Bool[Tensor, "*elements"]) -> Float[Tensor, "3"]:
    """[3] float64 count, sum and sum of squares of masked elements. Add those of micro-batches and ranks."""
    masked = torch.where(mask, values.double(), 0.0)
    return torch.stack([mask.double().sum(), masked.sum(), masked.square().sum()])


def whitened(
    values: Float[Tensor, "*elements"], mask: Bool[Tensor, "*elements"], moments: Float[Tensor, "3"]
) -> Float[Tensor, "*elements"]:
    """(values - mean) / sqrt(variance + 1e-8) inside the mask, 0 outside; dtype of `values`.

    The variance is unbiased, and 0 for fewer than two elements.
    """
    count, total, squares = moments
    mean = total / count.clamp(min=1.0)
    variance = (squares - count * mean.square()).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    centred = (values.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, centred, 0.0).to(values.dtype)


def value_loss(
    values: Float[Tensor, "*elements"],
    old_values: Float[Tensor, "*elements"],
    returns: Float[Tensor, "*elements"],
    clip: float | None = None,
    huber: float | None = None,
) -> Float[Tensor, "*elements"]:
    """Loss of V per element, to be summed by the caller; with a clip the larger of two losses.

    L = max(l(V - R), l(clip(V, V_old - clip, V_old + clip) - R)),  l(e) = e^2 / 2
    with huber h: l(e) = h (|e| - h / 2) where |e| > h

    The clip comes from the first implementations of PPO; Engstrom et al. 2020 (arXiv:2005.12729), section 3. The linear
    part is that of Huber 1964 (doi:10.1214/aoms/1177703732). Old values and returns are detached here.
    """
    returns, old = returns.detach(), old_values.detach()
    losses = _error_loss(values - returns, huber)
    if clip is not None:
        losses = torch.maximum(losses, _error_loss(values.clamp(old - clip, old + clip) - returns, huber))
    return losses


def _error_loss(error: Float[Tensor, "*elements"], huber: float | None) -> Float[Tensor, "*elements"]:
    squared = 0.5 * error.square()
    if huber is None:
        return squared
    return torch.where(error.abs() > huber, huber * (error.abs() - 0.5 * huber), squared)


@torch.no_grad()
def value_metrics(
    values: Float[Tensor, "*elements"],
    returns: Float[Tensor, "*elements"],
    losses: Float[Tensor, "*elements"],
    weights: Float[Tensor, "*elements"],
    means: Mapping[str, Shaped[Tensor, "*elements"]] = MappingProxyType({}),
) -> Metrics:
    """Quality of a value head, without elements of weight 0. `explained_variance` combines the merged deviations.

    Args:
        means: further values whose weighted means become metrics.
    """
    stds = {"train/value_error_std": returns - values, "train/return_std": returns}
    return element_metrics({"train/value_loss": losses, **means}, stds, weights)


def explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """1 - Var(R - V) / Var(R), from the standard deviations in `metrics`. Empty if there are none or Var(R) is 0.

    1 means that V predicts every return, 0 that it predicts no better than the mean return, below 0 worse.
    """
    return_std = metrics.get("train/return_std", 0.0)
    if not return_std > 0.0:
        return {}
    return {"train/explained_variance": 1.0 - (metrics["train/value_error_std"] / return_std) ** 2}
