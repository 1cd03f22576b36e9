"""The reward of an episode is what its environment gave: its return, or whether it succeeded."""

from __future__ import annotations

from typing import Literal

import torch

from unirl.reward.base import RewardScorer
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse, ScoringFailure

NO_SUCCESS = "reports no success, which is the reward. Set reward.backend.reward=return, or let it report one"


class EpisodeReturnRewardScorer(RewardScorer):
    """The mean return of the episodes of a row, or the fraction of them that succeeded.

    With the return as the reward, success is logged only, for rows whose environment reports it. A row has no score if
    its environment failed, or reports no success that is the reward: `reward.on_failure` says what happens then.
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
        reasons = {row: f"failed: {why}" for row, why in enumerate(episodes.faults) if why}
        if self.reward == "success":
            unknown = episodes.success.isnan().nonzero()[:, 0].tolist()
            reasons = dict.fromkeys(unknown, NO_SUCCESS) | reasons
        failed = torch.tensor([row in reasons for row in range(len(request))])
        success = episodes.success.masked_fill(failed, torch.nan)
        is_logged = self.reward == "return" and not bool(success.isnan().all())
        scores = {"return": episodes.returns} | ({"success": success} if self.reward == "success" else {})
        return RewardResponse(
            total=scores[self.reward].masked_fill(failed, torch.nan),
            components=scores,
            logged_rewards={"success": success} if is_logged else {},
            failures={
                row: (ScoringFailure("environment", f"the environment of sample {request.sample_ids[row]!r} {why}"),)
                for row, why in reasons.items()
            },
        )
