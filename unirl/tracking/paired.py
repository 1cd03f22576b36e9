"""Differences between two evaluations, paired over the prompts that both evaluated, with bootstrap intervals.

A prompt is easy or hard in both evaluations, so the difference within a prompt has less noise than the difference of
two means. Prompts are what is resampled: two samples of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unirl.tracking.samples import SampleRow

REWARD = "reward"
"""The name of the whole reward beside those of its components."""
LEVEL = 0.95
NUM_RESAMPLES = 10_000
BLOCK = 2**20
"""Random numbers that are drawn at once."""
FEWEST_PROMPTS = 3
"""Number of prompts from which an interval is given."""
Scores = Mapping[Hashable, Mapping[str, float]]
"""Mean score of the samples of a prompt: prompt to the name of a score to its mean."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of level LEVEL."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class PairedDifference:
    """One score in two evaluations, over the prompts that both scored."""

    name: str
    num_prompts: int
    before: float
    """Mean over prompts of the first evaluation."""
    after: float
    interval: Interval | None
    """The interval of `after - before`. None for fewer than FEWEST_PROMPTS prompts."""

    @property
    def difference(self) -> float:
        return self.after - self.before


def scores_by_prompt(rows: Sequence[SampleRow]) -> Scores:
    """The mean of each finite score over the samples of each prompt.

    A prompt is its text with its images. Where several groups have the same text and images, as the episodes of one
    task have, the id of the group belongs to the prompt, too.
    """
    groups = {(row.prompt, row.images, row.group_id) for row in rows}
    shared = Counter(group[:2] for group in groups)
    samples: dict[Hashable, dict[str, list[float]]] = {}
    for row in rows:
        text = row.prompt, row.images
        prompt = (*text, row.group_id) if shared[text] > 1 else text
        of_prompt = samples.setdefault(prompt, {})
        for name, score in ((REWARD, row.reward), *row.rewards.items()):
            if math.isfinite(score):
                of_prompt.setdefault(name, []).append(score)
    return {
        prompt: {name: math.fsum(values) / len(values) for name, values in scores.items()}
        for prompt, scores in samples.items()
    }


def paired_differences(before: Scores, after: Scores) -> list[PairedDifference]:
    """The differences of the scores that both have, the whole reward first. Empty if no prompt is in both."""
    common = [prompt for prompt in before if prompt in after]
    names = {name for prompt in common for name in before[prompt] if name in after[prompt]}
    found = []
    for name in sorted(names, key=lambda name: (name != REWARD, name)):
        pairs = [
            (before[prompt][name], after[prompt][name])
            for prompt in common
            if name in before[prompt] and name in after[prompt]
        ]
        first, second = zip(*pairs, strict=True)
        found.append(
            PairedDifference(
                name,
                len(pairs),
                math.fsum(first) / len(pairs),
                math.fsum(second) / len(pairs),
                interval([b - a for a, b in pairs]),
            )
        )
    return found


def interval(values: Sequence[float]) -> Interval | None:
    """The expanded percentile bootstrap interval of a mean (Hesterberg 2014, arXiv:1411.5279).

    A percentile interval is too narrow for few values. The levels are moved outwards so that the interval of normal
    values is as wide as Student's t interval. The seed is fixed, and the order of the values does not matter.

    Args:
        values: [n] one value per prompt. None is returned for fewer than FEWEST_PROMPTS.
    """
    if len(values) < FEWEST_PROMPTS:
        return None
    tail = expanded_tail(len(values))
    low, high = np.quantile(resampled_means(values), (tail, 1 - tail))
    return Interval(float(low), float(high))


def expanded_tail(n: int, level: float = LEVEL) -> float:
    """The share of resampled means beyond each end of the interval: Phi(-sqrt(n / (n - 1)) t), t of n - 1 degrees."""
    from scipy.special import ndtr, stdtrit

    t = stdtrit(n - 1, (1 + level) / 2)
    return float(ndtr(-math.sqrt(n / (n - 1)) * t))


def resampled_means(values: Sequence[float], num_resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """The means [num_resamples] of samples that are drawn from `values` [n] with replacement."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    generator = np.random.default_rng(0)
    block = max(BLOCK // n, 1)
    means = [
        ordered[generator.integers(n, size=(min(block, num_resamples - start), n))].mean(axis=1)
        for start in range(0, num_resamples, block)
    ]
    return np.concatenate(means)
