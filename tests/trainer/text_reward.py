"""A judge of texts, which may fail on some samples."""

from __future__ import annotations

import torch

from tests.trainer.faulty import drawn
from unirl.reward.base import RewardScorer, ScorerCost, single
from unirl.types.protocols import Capabilities


class SharedLetters(RewardScorer):
    """The share of a text's characters that the prompt has, too; NaN for a `share` of the samples."""

    reads = ("prompts", "texts")
    capabilities = Capabilities(modalities=("text",))

    def __init__(self, *, share: float = 0.0) -> None:
        self.share = share

    def score(self, request):
        scores = torch.tensor([shared(p, t) for p, t in zip(request.prompts, request.texts, strict=True)])
        scores[[drawn(sample, self.share) for sample in request.sample_ids]] = torch.nan
        return single("shared_letters", scores)


def shared(prompt: str, text: str) -> float:
    return sum(letter in prompt for letter in text) / max(len(text), 1)


class Costly(SharedLetters):
    """A judge with a network of 7 billion parameters."""

    cost = ScorerCost(parameters=7_000_000_000, flops=5e12)
