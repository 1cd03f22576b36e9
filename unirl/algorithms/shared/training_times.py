"""The choice of noise levels at which a sample is trained, for losses that need no trajectory.

A time is a level sigma in [0, 1]: 0 is the sample, 1 is noise. The times of a sample are a pure function of its id (one
random draw named `t`), so they do not depend on batches, ranks or the order of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from unirl.algorithms.shared.checks import check_above, check_key
from unirl.config.errors import InvalidValueError
from unirl.sde.noise import NoiseSource

if TYPE_CHECKING:
    from jaxtyping import Float

HALF_ULP = 2.0**-25
"""Half the spacing of float32 uniforms. Added to a uniform, it keeps it inside (0, 1), where quantiles are finite."""


@runtime_checkable
class TrainingTimes(Protocol):
    """A way to choose training times."""

    def count(self, num_steps: int) -> int:
        """n, the number of times per sample, for rollouts of `num_steps` denoising steps.

        Raises InvalidValueError if the schedule has too few levels.
        """

    def draw(self, sigmas: Float[Tensor, "levels"], noise: NoiseSource, ids: Sequence[str]) -> Float[Tensor, "B n"]:
        """[B, n] float32 on the CPU. Row b is a function of ids[b] alone.

        `sigmas` is the rollout's schedule [T + 1], terminal 0 included.
        """


@dataclass(frozen=True, kw_only=True)
class ScheduleTimes:
    """Levels of the rollout's own schedule, each at most once per sample, as in DiffusionNFT.

    The terminal 0 is never chosen.
    """

    fraction: float = 0.99
    """Fraction of the schedule to draw from: the floor(fraction x T) noisiest levels, at least one."""
    skip_first: bool = False
    """Leave out the noisiest level, which contains nothing of the sample."""
    num_times: int | None = None
    """Levels per sample, drawn anew at each step. Null, or more than there are: all levels of the fraction."""
    stratified: bool = False
    """Draw one level from each of `num_times` adjacent ranges."""
    shared: bool = False
    """Train all samples of a step at the same levels; otherwise each sample has its own."""

    def __post_init__(self) -> None:
        check_key(
            0.0 < self.fraction <= 1.0, "times.fraction", "lie in (0, 1]", self.fraction, "1 is the whole schedule"
        )
        check_key(self.num_times is None or self.num_times >= 1, "times.num_times", "be >= 1", self.num_times)

    def count(self, num_steps: int) -> int:
        levels = len(self._positions(num_steps))
        if levels == 0:
            raise InvalidValueError(
                f"algorithm.times has nothing to draw from: fraction={self.fraction:g} of {num_steps} denoising steps "
                "is the first level, which skip_first leaves out. Raise times.fraction or sampling.num_inference_steps"
            )
        return levels if self.num_times is None else min(self.num_times, levels)

    def draw(self, sigmas: Float[Tensor, "levels"], noise: NoiseSource, ids: Sequence[str]) -> Float[Tensor, "B n"]:
        num_steps = len(sigmas) - 1
        positions, count = self._positions(num_steps), self.count(num_steps)
        uniform = _uniform_draws(noise, ids, count if self.stratified else len(positions), self.shared)
        chosen = (
            _one_per_range(len(positions), count, uniform) if self.stratified else uniform.argsort(dim=1)[:, :count]
        )
        return sigmas.float().cpu()[positions.start + chosen]

    def _positions(self, num_steps: int) -> range:
        """Positions in the schedule that may be drawn."""
        # The offset corrects rounding: 0.29 x 100 is slightly less than 29.
        return range(int(self.skip_first), max(1, int(self.fraction * num_steps + 1e-9)))


def _one_per_range(size: int, count: int, uniform: Tensor) -> Tensor:
    """[B, n] one number from each of `count` adjacent ranges of 0 .. size - 1. Their lengths differ by at most one."""
    edges = torch.arange(count + 1) * size // count
    lengths = edges.diff()
    return edges[:-1] + (uniform * lengths).long().clamp(max=lengths - 1)


@dataclass(frozen=True, kw_only=True)
class ContinuousTimes(ABC):
    """Times of a continuous distribution, independent of the rollout's schedule. Subclasses write its quantiles."""

    num_times: int = 4
    """Times per sample."""
    stratified: bool = False
    """Draw time j from the j-th of `num_times` parts of equal probability."""
    shared: bool = False
    """Train all samples of a step at the same times."""

    def __post_init__(self) -> None:
        check_key(self.num_times >= 1, "times.num_times", "be >= 1", self.num_times)

    def count(self, num_steps: int) -> int:
        return self.num_times

    @abstractmethod
    def quantiles(self, u: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
        """The times at cumulative probabilities u in (0, 1), float64."""

    def draw(self, sigmas: Float[Tensor, "levels"], noise: NoiseSource, ids: Sequence[str]) -> Float[Tensor, "B n"]:
        u = _uniform_draws(noise, ids, self.num_times, self.shared).double() + HALF_ULP
        if self.stratified:
            u = (torch.arange(self.num_times, dtype=torch.float64) + u) / self.num_times
        return self.quantiles(u).float()


@dataclass(frozen=True, kw_only=True)
class UniformTimes(ContinuousTimes):
    """Times uniform in [low, high)."""

    low: float = 0.0
    """Smallest time, towards the sample."""
    high: float = 1.0
    """Largest time, towards noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.low < self.high <= 1.0:
            raise InvalidValueError(
                f"times.low={self.low:g} and times.high={self.high:g} must satisfy 0 <= low < high <= 1 (noise levels)"
            )

    def quantiles(self, u: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True, kw_only=True)
class LogitNormalTimes(ContinuousTimes):
    """t = s u / (1 + (s - 1) u), u = sigmoid(mean + std z), z ~ N(0, 1). Esser et al. 2024 (arXiv:2403.03206), eq. 19.

    `mean` shifts times towards noise (> 0) or the sample (< 0); `shift` s is the static shift of schedules, 1 = none.
    """

    mean: float = 0.0
    """Mean of the normal variable; > 0 shifts towards noise."""
    std: float = 1.0
    """Standard deviation of the normal variable."""
    shift: float = 1.0
    """Static shift s; 1 = none."""
    stratified: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0.0, "1 is usual", "times", std=self.std, shift=self.shift)

    def quantiles(self, u: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
        t = torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))
        return self.shift * t / (1.0 + (self.shift - 1.0) * t)


def _uniform_draws(noise: NoiseSource, ids: Sequence[str], count: int, shared: bool) -> Tensor:
    """[B, n] float32 in [0, 1). A draw that all samples share has an empty id, like the choice of denoising steps."""
    drawn = noise.uniform([""] if shared else ids, "t", (count,))
    return drawn.expand(len(ids), -1)
