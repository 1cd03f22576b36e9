"""Scorers that fail on some samples, in ways that a test chooses; and one that takes its time."""

from __future__ import annotations

import time
from zlib import crc32

import torch

from unirl.config.errors import RewardError
from unirl.reward.base import single
from unirl.reward.local.image_statistics import BrightnessRewardScorer


def drawn(sample_id: str, share: float) -> bool:
    """Whether this sample is among the unlucky `share`, by its name alone."""
    return crc32(sample_id.encode()) % 1000 < 1000 * share


class Poisoned(BrightnessRewardScorer):
    """NaN for some samples, always."""

    def __init__(self, *, share: float) -> None:
        self.share = share

    def score(self, request):
        scores = super().score(request).total
        scores[[drawn(sample, self.share) for sample in request.sample_ids]] = torch.nan
        return single("brightness", scores)


class Explosive(BrightnessRewardScorer):
    """Raises whenever some sample is among those that it gets; recovers after `failures` times, if that is given."""

    def __init__(self, *, share: float, failures: int | None = None) -> None:
        self.share = share
        self.left = failures

    def score(self, request):
        if any(drawn(sample, self.share) for sample in request.sample_ids) and self.left != 0:
            self.left = None if self.left is None else self.left - 1
            raise ConnectionResetError("the judge hung up")
        return super().score(request)


class Constant(BrightnessRewardScorer):
    """`value` for every picture."""

    def __init__(self, *, value: float) -> None:
        self.value = value

    def score(self, request):
        return single("constant", torch.full((len(request),), self.value))


class Picky(BrightnessRewardScorer):
    """Scores pictures of prompts that name a cat, and knows it beforehand."""

    def check_prompt(self, prompt, metadata):
        if "cat" not in prompt:
            raise RewardError(f"there is no cat in {prompt!r}")


class Slow(BrightnessRewardScorer):
    """Needs `seconds` for every picture."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def score(self, request):
        time.sleep(self.seconds * len(request))
        return super().score(request)
