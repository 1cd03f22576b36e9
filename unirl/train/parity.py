"""How far an engine's log-probs are from the trainer's replay of the same steps, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from unirl.algorithms.base import StageAlgorithm
from unirl.types.results import Metric, Metrics, merge
from unirl.types.rollout_resp import RolloutTrack

GAP_METRIC = "rollout/parity_absdiff_max"
"""What the anchor pass of every rollout measures."""

RATIO, SPREAD, GAP = "ratio_mean", "ratio_std", "absdiff_max"


@dataclass(frozen=True)
class StepParity:
    """The importance ratio r = exp(replayed - recorded log-prob) of one denoising step; 1 where both agree."""

    step: int
    ratio_mean: float
    ratio_std: float
    absdiff_max: float
    """Largest |log r|, nats."""


def parity_of(algorithm: StageAlgorithm[Any], stage: Any, rows: RolloutTrack) -> Metrics:
    """`{step}/{statistic}` over rows of weight > 0, under the weights in force; nothing without log-probs."""
    found: list[Metrics] = []
    for part in algorithm.parts(rows.segment):
        with torch.no_grad():
            logp = algorithm.measure(stage, rows, part).get("logp")
        if logp is None:
            return {}
        recorded = rows.segment.logp[:, rows.segment.columns_of(part)]
        log_ratio = torch.where(rows.weight[:, None] > 0, logp - recorded, 0.0)
        found += [_statistics(step, log_ratio[:, i], rows.weight) for i, step in enumerate(part)]
    return merge(found)


def _statistics(step: int, log_ratio: torch.Tensor, weights: torch.Tensor) -> Metrics:
    excess = torch.expm1(log_ratio)  # r - 1, whose spread around 0 survives float32
    return {
        f"{step}/{RATIO}": Metric.mean((weights * excess).sum() / weights.sum().clamp(min=1e-12), weights.sum()),
        f"{step}/{SPREAD}": Metric.std(excess, weights),
        f"{step}/{GAP}": Metric.max(log_ratio.abs().max()),
    }


def parity_table(metrics: Metrics) -> list[StepParity]:
    """One line per denoising step, in order."""
    steps = sorted({int(name.partition("/")[0]) for name in metrics})
    return [
        StepParity(
            step,
            1.0 + metrics[f"{step}/{RATIO}"].value,
            metrics[f"{step}/{SPREAD}"].value,
            metrics[f"{step}/{GAP}"].value,
        )
        for step in steps
    ]
