"""PickScore: the agreement of an image with its prompt, by a CLIP fine-tuned on human choices.

Kirstain et al. 2023, arXiv:2305.01569.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec

SCALE = 26.0
"""Divisor that brings the scores of good images near 1. The logits of PickScore are about 20 to 26."""


@dataclass(frozen=True, kw_only=True)
class PickScoreSpec(ClipSimilaritySpec):
    """The CLIP and its batch size."""

    path: str = "yuvalkirstain/PickScore_v1"
    """Hub id or local directory of the model; `toy` is a tiny network of the same class with fixed random weights."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or local directory of the tokenizer and image processor; `toy` does not read it."""


class PickScoreRewardScorer(ClipSimilarityScorer):
    """exp(logit_scale) * cosine(image, prompt) / 26, in float32."""

    name = "pickscore"

    def __init__(self, *, config: PickScoreSpec = PickScoreSpec()) -> None:
        super().__init__(config)

    def scaled(self, cosine: Tensor) -> Tensor:
        return self.logits(cosine) / SCALE
