"""Compares an engine's log-probs with the trainer's replay of the same samples, before anything is trained.

The loss clips at a ratio of 1 +- clip_range, so the gate measures a difference in clip ranges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.contract import check_outputs, computing
from unirl.config.errors import ParityError
from unirl.config.recipe import ParityConfig
from unirl.types.results import Metric, Metrics, merge
from unirl.types.rollout_resp import RolloutTrack

GAP_METRIC = "rollout/parity_absdiff_max"
"""Largest |log r| of a rollout, in nats. The first update measures it, and the anchor pass where there is one."""

RATIO, SPREAD, GAP = "ratio_mean", "ratio_std", "absdiff_max"

CAUSES = (
    "the engine samples from other weights (another checkpoint, an adapter that is not bound), in another dtype "
    "(rollout.dtype, rollout.weight_dtype, trajectory_dtype), with another schedule, guidance, temperature or "
    "tokenizer, records log-probs of what was left after truncation (top_p, top_k), or it forwards batches of other "
    "sizes on kernels whose bits depend on them"
)


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
        with torch.no_grad(), computing(algorithm, "measure"):
            outputs = algorithm.measure(stage, rows, part)
        check_outputs(algorithm, "measure", outputs, ())
        logp = outputs.get("logp")
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


@dataclass(frozen=True)
class ParityGate:
    """Judges the ratios of the first rollout of a process, and the largest gap of every later one."""

    config: ParityConfig
    clip_range: float
    """The smaller half width of the loss's trust region."""

    def judge(self, table: Sequence[Parity]) -> str | None:
        """A warning, or None where both agree. Raises ParityError (9002) at or beyond `parity.stop`."""
        # NaN is the worst gap. It compares as false with every number.
        worst = max(table, key=lambda line: (math.isnan(line.absdiff_max), line.absdiff_max), default=None)
        if worst is None or not self.is_suspicious(worst.absdiff_max):
            return None
        text = (
            f"before the first update the importance ratio should be 1, but at {worst.place} the "
            f"engine's log-probs differ from the trainer's replay by up to {worst.absdiff_max:.3g} nats "
            f"({worst.absdiff_max / self.clip_range:.3g} clip ranges of {self.clip_range:g}; ratio "
            f"{worst.ratio_mean:.6f} +- {worst.ratio_std:.2g}). All: "
            f"{', '.join(f'{line.place} {line.absdiff_max:.2g}' for line in table)}. Probable causes: {CAUSES}"
        )
        if self.config.stop and not worst.absdiff_max < self.config.stop * self.clip_range:
            raise ParityError(f"{text}. Remove the cause, or set parity.stop=0 to train with this difference")
        return text

    def is_suspicious(self, absdiff: float) -> bool:
        """True if a difference of `absdiff` nats deserves a warning."""
        return self.config.warn > 0 and not absdiff < self.config.warn * self.clip_range
