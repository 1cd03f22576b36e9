"""Running statistics of what environments show and give: they scale the observations and the rewards of PPO.

Engstrom et al. 2020, arXiv:2005.12729, section 3: both are part of what makes PPO work in MuJoCo.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.algorithms.shared.critic import DenseLayout
from unirl.distributed import current
from unirl.models.policies.networks import statistics_of
from unirl.types.segments import ActionSegment

EPSILON = 1e-8
"""Added to variances."""
REWARD_CLIP = 10.0
"""Bound of the absolute values of rewards that are scaled."""
ENCODERS = ("encoder", "value_head.encoder")
"""The encoders of the policy and of the value head, by the prefix of their parameters."""


class RunningMoments:
    """Number, mean and variance of all values so far, in float64 on the CPU, over all ranks."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = torch.zeros((), dtype=torch.float64)
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros(shape, dtype=torch.float64)
        """The sum of squared distances from the mean."""

    def add(self, values: Tensor) -> None:
        """Add values [N, *shape] of this rank. A collective. Chan et al. 1983, doi:10.1080/00031305.1983.10483115."""
        values = values.cpu().double()
        rank = current()
        count = rank.total_over_dp(torch.tensor(float(len(values))))
        if not count:
            return
        mean = rank.total_over_dp(values.sum(0)) / count
        squares = rank.total_over_dp((values - mean).square().sum(0))
        total, gap = self.count + count, mean - self.mean
        self.squares += squares + gap.square() * self.count * count / total
        self.mean += gap * count / total
        self.count = total

    @property
    def std(self) -> Tensor:
        """[*shape] the square root of the variance + EPSILON; 1 before the first value."""
        return (self.squares / self.count + EPSILON).sqrt() if self.count else torch.ones_like(self.mean)


class RunningStatistics:
    """The moments of observations by key and, as `rewards`, of discounted sums of rewards."""

    def __init__(self, observations: Mapping[str, tuple[int, ...]], rewards: bool) -> None:
        """
        Args:
            observations: shapes by key of those that are normalized.
            rewards: follow the rewards too.
        """
        self.observations = {key: RunningMoments(shape) for key, shape in observations.items()}
        self.rewards = RunningMoments(()) if rewards else None

    def see(self, segment: ActionSegment, counted: Tensor) -> Mapping[str, Tensor]:
        """Add the observations of the decisions `counted` [sum L] bool. The parameters of the encoders, by name."""
        found: dict[str, Tensor] = {}
        for key, moments in self.observations.items():
            moments.add(segment.observations[key][counted.to(segment.observations[key].device)])
            for name, value in zip(statistics_of(key), (moments.mean, moments.std), strict=True):
                found |= {f"{encoder}.{name}": value.float() for encoder in ENCODERS}
        return found

    def scaled_rewards(self, segment: ActionSegment, counted: Tensor, gamma: float) -> Tensor:
        """[sum L] rewards over the running std of R_t = gamma R_{t-1} + r_t, clipped. R is 0 where an episode begins.

        The std includes these rewards.
        """
        assert self.rewards is not None
        layout = DenseLayout.of(segment.offsets, segment.rewards.device)
        rewards, ends = layout.dense(segment.rewards).double(), layout.dense(segment.ends)
        sums, running = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
        for t in range(rewards.shape[1]):
            running = gamma * running + rewards[:, t]
            sums[:, t] = running
            running = running.masked_fill(ends[:, t], 0.0)
        self.rewards.add(layout.packed(sums)[counted])
        return (segment.rewards / self.rewards.std.to(segment.rewards)).clamp(-REWARD_CLIP, REWARD_CLIP)

    # The state that a checkpoint contains

    def _named(self) -> dict[str, RunningMoments]:
        named = {f"observations.{key}": moments for key, moments in self.observations.items()}
        return named if self.rewards is None else {**named, "rewards": self.rewards}

    def state(self) -> dict[str, Tensor]:
        """All moments."""
        return {f"{name}.{part}": value for name, each in self._named().items() for part, value in vars(each).items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned."""
        for name, each in self._named().items():
            for part in vars(each):
                setattr(each, part, tensors[f"{name}.{part}"].clone())
