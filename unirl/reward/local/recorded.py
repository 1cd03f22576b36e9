"""Rewards an image of a preference pair by its recorded role: chosen or rejected."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unirl.config.errors import IncompatibleError
from unirl.reward.base import RewardScorer, single
from unirl.reward.scoring import name_of, response_of
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout_req import RECORDED

WORTH: Mapping[object, float] = {"chosen": 1.0, "rejected": 0.0}


class RecordedRewardScorer(RewardScorer):
    """1 for the chosen image of a pair, 0 for the rejected one. The scorer `drawn` scores generated images."""

    reads_levels = True
    capabilities = Capabilities(recorded=True, modalities=("image",))

    def __init__(self, *, drawn: RewardScorer | None = None) -> None:
        """
        Args:
            drawn: the scorer of generated images, which evaluations produce. Without it, they are refused.
        """
        self.drawn = drawn
        self.parts = () if drawn is None else (drawn,)
        self.reads = tuple(sorted({"metadata", *(() if drawn is None else drawn.reads)}))

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.metadata is not None
        roles = [metadata.get(RECORDED) for metadata in request.metadata]
        if self.drawn is not None and not any(roles):
            return response_of(self.drawn, request, name_of(self.drawn))
        for sample_id, role in zip(request.sample_ids, roles, strict=True):
            if role not in WORTH:
                raise IncompatibleError(
                    f"sample {sample_id!r} is not a recorded image (its role: {role}), so that it has no preference. "
                    "Set evaluation.eval_steps=0, or set reward.backend.drawn to a scorer of generated images"
                )
        return single("preference", torch.tensor([WORTH[role] for role in roles]))

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        """Accepts every prompt: a recorded one need not suit the scorer of generated images."""
