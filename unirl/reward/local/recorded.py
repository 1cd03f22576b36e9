"""Rewards a recorded picture for what was recorded of it: whether it was the preferred one of a pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unirl.config.errors import IncompatibleError
from unirl.reward.base import RewardScorer, single
from unirl.reward.scoring import name_of, response_of
from unirl.types.protocols import Capabilities, Scorer
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout_req import RECORDED

WORTH: Mapping[str, float] = {"chosen": 1.0, "rejected": 0.0}


class RecordedRewardScorer(RewardScorer):
    """1 for the chosen picture of a pair, 0 for the rejected one. Nobody has judged a drawn picture: `drawn` does."""

    capabilities = Capabilities(recorded=True, modalities=("image",))

    def __init__(self, *, drawn: Scorer | None = None) -> None:
        """
        Args:
            drawn: what scores pictures that were drawn, as evaluations do; absent = they are refused.
        """
        self.drawn = drawn
        self.reads = tuple(sorted({"metadata", *(() if drawn is None else drawn.reads)}))

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.metadata is not None
        roles: list[Any] = [about.get(RECORDED) for about in request.metadata]
        if self.drawn is not None and not any(roles):
            return response_of(self.drawn, request, name_of(self.drawn))
        for sample_id, role in zip(request.sample_ids, roles, strict=True):
            if role not in WORTH:
                raise IncompatibleError(
                    f"sample {sample_id!r} is no recorded picture (its role: {role}), so no preference is known of it. "
                    "Set evaluation.eval_steps=0, or name in reward.backend.drawn what scores drawn pictures"
                )
        return single("preference", torch.tensor([WORTH[role] for role in roles]))

    def offload(self) -> None:
        if self.drawn is not None:
            self.drawn.offload()

    def onload(self) -> None:
        if self.drawn is not None:
            self.drawn.onload()
