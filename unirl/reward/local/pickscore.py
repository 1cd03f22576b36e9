"""PickScore: how well a picture fits its prompt, by a CLIP tuned on what people chose.

Kirstain et al. 2023, arXiv:2305.01569.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec

SCALE = 26.0
"""Scores of good pictures come out near 1: PickScore's own logits lie near 20 to 26."""


@dataclass(frozen=True, kw_only=True)
class PickScoreSpec(ClipSimilaritySpec):
    """Which CLIP, and how many pictures at a time."""

    path: str = "yuvalkirstain/PickScore_v1"
    """Hub id or local directory of the model; `toy` is the same class, tiny, with fixed random weights."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or local directory of the tokenizer and image processor; not read by `toy`."""


class PickScoreRewardScorer(ClipSimilarityScorer):
    """exp(logit_scale) * cosine(image, prompt) / 26, in float32."""

    name = "pickscore"

    def __init__(self, *, config: PickScoreSpec = PickScoreSpec()) -> None:
        super().__init__(config)

    def scaled(self, cosine: Tensor) -> Tensor:
        return self.logits(cosine) / SCALE
