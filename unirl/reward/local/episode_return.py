"""The reward of an episode is what its environment gave: its return, or whether it succeeded."""

from __future__ import annotations

from typing import Literal

from unirl.reward.base import RewardScorer
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


class EpisodeReturnRewardScorer(RewardScorer):
    """The mean return of the episodes of a row, or the fraction of them that succeeded. Both are components."""

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
        scores = {"return": request.episodes.returns, "success": request.episodes.success}
        return RewardResponse(total=scores[self.reward], components=scores)
