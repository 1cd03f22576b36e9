"""Compares an engine's log-probs with the trainer's replay of the same samples, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import StageAlgorithm
from unirl.types.results import Metric, Metrics, merge
from unirl.types.rollout_resp import RolloutTrack

GAP_METRIC = "rollout/parity_absdiff_max"
"""Largest |log r| of a rollout, in nats. The anchor pass measures it."""

RATIO, SPREAD, GAP = "ratio_mean", "ratio_std", "absdiff_max"


@dataclass(frozen=True)
class Parity:
    """Statistics of the importance ratio r = exp(replayed - recorded log-prob) at one place. r = 1 where both agree."""

    place: str
    """Name of a denoising step, or of all tokens."""
    ratio_mean: float
    ratio_std: float
    absdiff_max: float
    """Largest |log r|, nats."""


def parity_of(algorithm: StageAlgorithm[Any], stage: Any, rows: RolloutTrack) -> Metrics:
    """Statistics of the importance ratio under the current weights, as metrics named `{place}/{statistic}`.

    Only rows of weight > 0 count. The result is empty if the algorithm measures no log-probs. The segment compares the
    replayed log-probs with the ones it recorded, and names the places.
    """
    metrics: list[Metrics] = []
    for part in algorithm.parts(rows.segment):
        with torch.no_grad():
            logp = algorithm.measure(stage, rows, part).get("logp")
        if logp is None:
            return {}
        places = rows.segment.log_ratios(part, logp, rows.weight)
        metrics += [_statistics(place, log_ratio, weights) for place, (log_ratio, weights) in places.items()]
    return merge(metrics)


def _statistics(place: str, log_ratio: Tensor, weights: Tensor) -> Metrics:
    excess = torch.expm1(log_ratio)  # r - 1: float32 resolves small values around 0 better than around 1
    return {
        f"{place}/{RATIO}": Metric.mean((weights * excess).sum() / weights.sum().clamp(min=1e-12), weights.sum()),
        f"{place}/{SPREAD}": Metric.std(excess, weights),
        f"{place}/{GAP}": Metric.max(log_ratio.abs().max()),
    }


def parity_table(metrics: Metrics) -> list[Parity]:
    """The metrics of `parity_of` as one `Parity` per place, in the order of the steps."""
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
