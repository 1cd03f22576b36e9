"""Metrics that can be merged over micro-batches and ranks, and the result of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from unirl.types.batch import HeavyChange, map_value

Reduction = Literal["mean", "std", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A value that can be merged with others. Tensors stay on their device until `value` is read."""

    total: Tensor | float
    """The weighted sum of the elements for `mean` and `std`, else the value itself."""
    weight: Tensor | float
    kind: Reduction
    squares: Tensor | float = 0.0
    """The weighted sum of the squared elements, for `std` only. A `std` of total 0 is a root mean square."""

    @staticmethod
    def mean(value: Tensor | float, weight: Tensor | float = 1.0) -> Metric:
        """The mean `value` of elements whose weights sum to `weight`."""
        return Metric(value * weight, weight, "mean")

    @staticmethod
    def std(values: Tensor, weights: Tensor) -> Metric:
        """The population standard deviation of elements with `weights` of the same shape. Merging is exact.

        Subtract a constant near the mean first. In float32, the squares of values around 1 lose a spread of 1e-5; the
        squares of values around 0 keep it.
        """
        weighted = weights * values
        return Metric(weighted.sum(), weights.sum(), "std", (weighted * values).sum())

    @staticmethod
    def rms(values: Tensor, weights: Tensor) -> Metric:
        """The root mean square of elements with `weights` of the same shape: their deviation from 0. Merging is exact.

        Elements of weight 0 are ignored, even if they are not finite. The squares are rounded to float32: their sum in
        float64 is then the same in any order, unless some are smaller than the sum by a factor of 2^29.
        """
        squares = (weights * values.square()).masked_fill(~(weights > 0), 0.0).float()
        return Metric(0.0, weights.double().sum(), "std", squares.double().sum())

    @staticmethod
    def sum(value: Tensor | float) -> Metric:
        return Metric(value, 1.0, "sum")

    @staticmethod
    def max(value: Tensor | float) -> Metric:
        return Metric(value, 1.0, "max")

    @staticmethod
    def min(value: Tensor | float) -> Metric:
        return Metric(value, 1.0, "min")

    @property
    def value(self) -> float:
        """The number to log. A mean over elements of total weight 0 is 0."""
        if self.kind not in ("mean", "std"):
            return float(self.total)
        weight = float(self.weight)
        mean = float(self.total) / weight if weight else 0.0
        if self.kind == "mean" or not weight:
            return mean
        variance = float(self.squares) / weight - mean**2
        return variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))

    def double(self) -> Metric:
        """The metric in float64, in which sums hardly depend on how elements are spread over batches and ranks."""
        parts = (self.total, self.weight, self.squares)
        if all(part.dtype == torch.float64 for part in parts if isinstance(part, Tensor)):  # most metrics of tokens
            return self
        total, weight, squares = [part.double() if isinstance(part, Tensor) else part for part in parts]
        return Metric(total, weight, self.kind, squares)

    def merged(self, other: Metric) -> Metric:
        """The metric over the elements of both."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {self.kind} metric with a {other.kind} metric of the same name")
        if self.kind in ("mean", "std", "sum"):
            weight = 1.0 if self.kind == "sum" else self.weight + other.weight
            return Metric(self.total + other.total, weight, self.kind, self.squares + other.squares)
        pick = torch.maximum if self.kind == "max" else torch.minimum
        return Metric(pick(torch.as_tensor(self.total), torch.as_tensor(other.total)), 1.0, self.kind)


Metrics = dict[str, Metric]

Series = dict[str, list[float]]
"""Values along one sample by name, such as `log_ratio` of each token or denoising step."""


def merge(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of several micro-batches, parts or ranks, merged by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merged(metric) if name in merged else metric
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """The numbers to log, by name."""
    return {name: metric.value for name, metric in metrics.items()}


@dataclass(frozen=True)
class TrainStepResult:
    """Metrics of the optimizer updates of one step."""

    updates: tuple[Metrics, ...]
    """One entry per update, in order."""
    series: dict[str, Series] = field(default_factory=dict)
    """Values along the samples that the caller asked for, by sample id."""

    @property
    def metrics(self) -> Metrics:
        """The metrics merged over all updates."""
        return merge(self.updates)


@map_value.register
def _(value: Metric, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> Metric:
    # A step of many updates has thousands of metrics, and `map_value` takes longer than what it finds here.
    total, weight, squares = [
        fn(part) if isinstance(part, Tensor) else part for part in (value.total, value.weight, value.squares)
    ]
    return Metric(total, weight, value.kind, squares)


@map_value.register
def _(value: TrainStepResult, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> TrainStepResult:
    return TrainStepResult(tuple(map_value(update, fn) for update in value.updates), value.series)
