"""CLIP score: the similarity of an image and its prompt in a CLIP embedding (Radford 2021, arXiv:2103.00020)."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.models.loading.hub import ModelSource
from unirl.reward.base import CLIP_L
from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec


@dataclass(frozen=True, kw_only=True)
class ClipSpec(ClipSimilaritySpec):
    path: ModelSource = "openai/clip-vit-large-patch14"
    processor: ModelSource = "openai/clip-vit-large-patch14"


class ClipRewardScorer(ClipSimilarityScorer):
    """exp(logit_scale) * cosine(image, prompt) / 30, in float32."""

    cost = CLIP_L
    name = "clip"
    divisor = 30.0  # about the logits of images that match their prompt by OpenAI's weights, whose scale is 100

    def __init__(self, *, config: ClipSpec = ClipSpec()) -> None:
        super().__init__(config)
