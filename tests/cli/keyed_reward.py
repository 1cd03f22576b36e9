"""A reward with secret keys, which may put them into its errors."""

from __future__ import annotations

from unirl.reward.base import RewardScorer, single
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.secrets import Secret


class KeyedRewardScorer(RewardScorer):
    reads = ("images",)

    def __init__(
        self, *, api_key: str, phrase: Secret, address: str | None = None, header: str = "", fails: bool = False
    ) -> None:
        self.secrets = (api_key, phrase, address, header)
        self.fails = fails

    def score(self, request: RewardRequest) -> RewardResponse:
        if self.fails:
            raise ValueError(f"the service refused {self.secrets}")
        assert request.images is not None
        return single("keyed", request.images.float().mean(dim=(1, 2, 3)))
