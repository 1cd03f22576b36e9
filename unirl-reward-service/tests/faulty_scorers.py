"""A scorer that does what its prompts say; a package of its own, as a user's scorers are."""

from __future__ import annotations

import os
import time

import torch

from unirl.reward.base import RewardScorer, single
from unirl.types.reward import RewardRequest, RewardResponse


class Obedient(RewardScorer):
    """The length of the prompt, unless it asks for harm."""

    reads = ("prompts",)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.prompts is not None
        return single("length", torch.tensor([obey(prompt) for prompt in request.prompts]))


def obey(prompt: str) -> float:
    if prompt == "crash":
        os._exit(3)
    if prompt == "hang":
        time.sleep(1000)
    if prompt == "slow":
        time.sleep(1.0)
    if prompt == "raise":
        raise ValueError("no such thing")
    return float("nan") if prompt == "nan" else float(len(prompt))
