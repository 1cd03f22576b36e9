"""PickScore: the agreement of an image with its prompt, by a CLIP fine-tuned on human choices.

Kirstain et al. 2023, arXiv:2305.01569.
"""

from __future__ import annotations

from dataclasses import dataclass

from unirl.models.loading.hub import ModelSource
from unirl.reward.base import CLIP_H
from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec


@dataclass(frozen=True, kw_only=True)
class PickScoreSpec(ClipSimilaritySpec):
    path: ModelSource = "yuvalkirstain/PickScore_v1"
    processor: ModelSource = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PickScoreRewardScorer(ClipSimilarityScorer):
    """exp(logit_scale) * cosine(image, prompt) / 26, in float32."""

    cost = CLIP_H

    name = "pickscore"
    divisor = 26.0  # the logits of PickScore are about 20 to 26

    def __init__(self, *, config: PickScoreSpec = PickScoreSpec()) -> None:
        super().__init__(config)
