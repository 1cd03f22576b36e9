"""How far an engine's log-probs are from the trainer's replay of the same samples, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import StageAlgorithm
from unirl.types.results import Metric, Metrics, merge
from unirl.types.rollout_resp import RolloutTrack

GAP_METRIC = "rollout/parity_absdiff_max"
"""The metric that the anchor pass of every rollout measures."""

RATIO, SPREAD, GAP = "ratio_mean", "ratio_std", "absdiff_max"


@dataclass(frozen=True)
class Parity:
    """The importance ratio r = exp(replayed - recorded log-prob) at one place of a sample; 1 where both agree."""

    place: str
    """A denoising step, or all tokens."""
    ratio_mean: float
    ratio_std: float
    absdiff_max: float
    """Largest |log r|, nats."""


def parity_of(algorithm: StageAlgorithm[Any], stage: Any, rows: RolloutTrack) -> Metrics:
    """`{place}/{statistic}` over rows of weight > 0, under the weights in force; nothing without log-probs.

    The segment knows what of it was recorded, and where that stands.
    """
    found: list[Metrics] = []
    for part in algorithm.parts(rows.segment):
        with torch.no_grad():
            logp = algorithm.measure(stage, rows, part).get("logp")
        if logp is None:
            return {}
        places = rows.segment.log_ratios(part, logp, rows.weight)
        found += [_statistics(place, log_ratio, weights) for place, (log_ratio, weights) in places.items()]
    return merge(found)


def _statistics(place: str, log_ratio: Tensor, weights: Tensor) -> Metrics:
    excess = torch.expm1(log_ratio)  # r - 1, whose spread around 0 survives float32
    return {
        f"{place}/{RATIO}": Metric.mean((weights * excess).sum() / weights.sum().clamp(min=1e-12), weights.sum()),
        f"{place}/{SPREAD}": Metric.std(excess, weights),
        f"{place}/{GAP}": Metric.max(log_ratio.abs().max()),
    }


def parity_table(metrics: Metrics) -> list[Parity]:
    """One line per place, steps in order."""
    places = {name.rpartition("/")[0] for name in metrics}
    return [
        Parity(
            place,
            1.0 + metrics[f"{place}/{RATIO}"].value,
            metrics[f"{place}/{SPREAD}"].value,
            metrics[f"{place}/{GAP}"].value,
        )
        for place in sorted(places, key=lambda place: (len(place), place))  # step 10 after step 9
    ]
