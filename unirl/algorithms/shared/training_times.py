"""At which noise levels a sample is trained: pure functions of its id, for losses that need no trajectory.

A time is a level sigma in [0, 1]: 0 is the sample, 1 is noise. One draw, named `t`, gives all times of a sample, so
they do not depend on batches, ranks or the order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.sde.noise import NoiseSource

HALF_ULP = 2.0**-25
"""Half the spacing of float32 uniforms: added to them, they lie inside (0, 1), where quantiles are finite."""


@runtime_checkable
class TrainingTimes(Protocol):
    """A way to choose training times."""

    def count(self, num_steps: int) -> int:
        """n, times per sample, for rollouts of `num_steps` denoising steps. ConfigError when there are not so many."""
        ...

    def draw(self, sigmas: Tensor, noise: NoiseSource, ids: Sequence[str]) -> Tensor:
        """[B, n] float32 on the CPU; row b is a function of ids[b] alone.

        Args:
            sigmas: [T + 1] the rollout's schedule, terminal 0 included.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ScheduleTimes:
    """Levels of the rollout's own schedule, each at most once per sample: what DiffusionNFT trains on.

    The terminal 0 is never among them.
    """

    fraction: float = 0.99
    """The noisy part of the schedule that is drawn from: the first floor(fraction x T) levels, at least one."""
    skip_first: bool = False
    """Leave out the noisiest level, which holds nothing of the sample."""
    num_times: int | None = None
    """Levels per sample, drawn anew at each step; absent, and where the part has no more than these: all of it."""
    stratified: bool = False
    """Draw one level from each of so many adjacent stretches."""
    shared: bool = False
    """All samples of a step are trained at the same levels; otherwise each at its own."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise InvalidValueError(f"times.fraction must lie in (0, 1], got {self.fraction:g}; 1 is the whole")
        if self.num_times is not None:
            _check_number(self.num_times)

    def count(self, num_steps: int) -> int:
        """`num_times`, and no more than the part has."""
        levels = len(self._part(num_steps))
        if levels == 0:
            raise InvalidValueError(
                f"algorithm.times has nothing to draw from: fraction={self.fraction:g} of {num_steps} denoising steps "
                "is the first level, which skip_first leaves out. Raise times.fraction or sampling.num_inference_steps"
            )
        return levels if self.num_times is None else min(self.num_times, levels)

    def draw(self, sigmas: Tensor, noise: NoiseSource, ids: Sequence[str]) -> Tensor:
        """[B, n] float32 on the CPU."""
        num_steps = len(sigmas) - 1
        part, count = self._part(num_steps), self.count(num_steps)
        uniform = _uniform(noise, ids, count if self.stratified else len(part), self.shared)
        chosen = _stretches(len(part), count, uniform) if self.stratified else uniform.argsort(dim=1)[:, :count]
        return sigmas.float().cpu()[part.start + chosen]

    def _part(self, num_steps: int) -> range:
        """Positions of the schedule."""
        # A hair more: 0.29 x 100 is a little less than 29.
        return range(int(self.skip_first), max(1, int(self.fraction * num_steps + 1e-9)))


def _stretches(size: int, count: int, uniform: Tensor) -> Tensor:
    """[B, n] one of each of `count` adjacent stretches of 0 .. size - 1, which differ in length by at most one."""
    edges = torch.arange(count + 1) * size // count
    lengths = edges.diff()
    return edges[:-1] + (uniform * lengths).long().clamp(max=lengths - 1)


@dataclass(frozen=True, kw_only=True)
class UniformTimes:
    """Times uniform in [low, high), whatever levels the rollout had."""

    num_times: int = 4
    """Times per sample."""
    low: float = 0.0
    high: float = 1.0
    stratified: bool = False
    """Time j lies in the j-th of `num_times` equal parts."""
    shared: bool = False
    """All samples of a step are trained at the same times."""

    def __post_init__(self) -> None:
        _check_number(self.num_times)
        if not 0.0 <= self.low < self.high <= 1.0:
            raise InvalidValueError(
                f"times.low={self.low:g} and times.high={self.high:g} must satisfy 0 <= low < high <= 1 (noise levels)"
            )

    def count(self, num_steps: int) -> int:
        """`num_times`."""
        return self.num_times

    def draw(self, sigmas: Tensor, noise: NoiseSource, ids: Sequence[str]) -> Tensor:
        """[B, n] float32 on the CPU."""
        u = _quantiles(noise, ids, self.num_times, self.stratified, self.shared)
        return (self.low + (self.high - self.low) * u).float()


@dataclass(frozen=True, kw_only=True)
class LogitNormalTimes:
    """t = s u / (1 + (s - 1) u), u = sigmoid(mean + std z), z ~ N(0, 1). Esser et al. 2024 (arXiv:2403.03206), eq. 19.

    `mean` shifts towards noise (> 0) or the sample (< 0); `shift` s is the static shift of schedules, 1 = none.
    """

    num_times: int = 4
    """Times per sample."""
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    stratified: bool = True
    """Time j lies in the j-th of `num_times` parts of equal probability."""
    shared: bool = False
    """All samples of a step are trained at the same times."""

    def __post_init__(self) -> None:
        _check_number(self.num_times)
        for name, value in (("std", self.std), ("shift", self.shift)):
            if value <= 0:
                raise InvalidValueError(f"times.{name} must be > 0, got {value:g}; 1 is usual")

    def count(self, num_steps: int) -> int:
        """`num_times`."""
        return self.num_times

    def draw(self, sigmas: Tensor, noise: NoiseSource, ids: Sequence[str]) -> Tensor:
        """[B, n] float32 on the CPU."""
        z = torch.special.ndtri(_quantiles(noise, ids, self.num_times, self.stratified, self.shared))
        u = torch.sigmoid(self.mean + self.std * z)
        return (self.shift * u / (1.0 + (self.shift - 1.0) * u)).float()


def _quantiles(noise: NoiseSource, ids: Sequence[str], count: int, stratified: bool, shared: bool) -> Tensor:
    """[B, n] float64 in (0, 1); stratified: entry j within (j / n, (j + 1) / n)."""
    u = _uniform(noise, ids, count, shared).double() + HALF_ULP
    return (torch.arange(count, dtype=torch.float64) + u) / count if stratified else u


def _uniform(noise: NoiseSource, ids: Sequence[str], count: int, shared: bool) -> Tensor:
    """[B, n] float32 in [0, 1). A draw that all samples share has no id, like the choice of denoising steps."""
    drawn = noise.uniform([""] if shared else ids, "t", (count,))
    return drawn.expand(len(ids), -1)


def _check_number(num_times: int) -> None:
    if num_times < 1:
        raise InvalidValueError(f"times.num_times must be >= 1, got {num_times}")
