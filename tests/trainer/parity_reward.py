"""A reward of texts that a model of random weights can have: the share of characters with even numbers."""

from __future__ import annotations

import torch

from unirl.reward.base import RewardScorer
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, RewardRequest, RewardResponse


class EvenLettersRewardScorer(RewardScorer):
    """The answer of a response is its number of even characters, and right answers are even themselves."""

    reads = ("texts",)
    capabilities = Capabilities(modalities=("text",))

    def score(self, request: RewardRequest) -> RewardResponse:
        counts = [sum(ord(letter) % 2 == 0 for letter in text) for text in request.texts]
        shares = torch.tensor([count / max(len(text), 1) for count, text in zip(counts, request.texts, strict=True)])
        answers = [Answer(count % 2 == 0, str(count)) for count in counts]
        return RewardResponse(total=shares, components={"even": shares}, answers=answers)
