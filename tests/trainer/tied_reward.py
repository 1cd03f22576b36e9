"""A reward by which groups differ or not, whatever was drawn: groups of numbers in a hash of their ids."""

from __future__ import annotations

from hashlib import blake2b

import torch

from unirl.reward.base import RewardScorer
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


class TiedRewardScorer(RewardScorer):
    """Of three groups, `ties` have one reward for all samples; in the others every sample has its own."""

    reads = ()
    capabilities = Capabilities(modalities=("text",))

    def __init__(self, *, ties: int = 2) -> None:
        self.ties = ties

    def score(self, request: RewardRequest) -> RewardResponse:
        scores = torch.tensor([self.score_of(sample) for sample in request.sample_ids])
        return RewardResponse(total=scores, components={"tied": scores})

    def score_of(self, sample: str) -> float:
        group = sample.rpartition(":")[0]
        return 1.0 if number(group) % 3 < self.ties else number(sample) % 1000 / 1000.0


def number(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")
