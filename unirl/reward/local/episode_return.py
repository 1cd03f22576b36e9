"""The reward of an episode is what its environment gave: its return, or whether it succeeded."""

from __future__ import annotations

from typing import Literal

import torch

from unirl.reward.base import RewardScorer
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse, ScoringFailure


class EpisodeReturnRewardScorer(RewardScorer):
    """The mean return of the episodes of a row, or the fraction of them that succeeded. Both are components.

    A row whose environment failed has no score: `reward.on_failure` says what happens then.
    """

    reads = ("episodes",)
    capabilities = Capabilities(modalities=("action",))

    def __init__(self, *, reward: Literal["return", "success"] = "return") -> None:
        """
        Args:
            reward: what the total is.
        """
        self.reward = reward

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.episodes is not None
        episodes = request.episodes
        scores = {"return": episodes.returns, "success": episodes.success}
        failures = {
            row: (
                ScoringFailure("environment", f"the environment of sample {request.sample_ids[row]!r} failed: {why}"),
            )
            for row, why in enumerate(episodes.faults)
            if why
        }
        failed = torch.tensor([bool(why) for why in episodes.faults])
        return RewardResponse(
            total=scores[self.reward].masked_fill(failed, torch.nan), components=scores, failures=failures
        )
