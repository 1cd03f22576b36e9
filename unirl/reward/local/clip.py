"""CLIP score: the similarity of an image and its prompt in a CLIP embedding (Radford 2021, arXiv:2103.00020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec

SCALE = 30.0
"""The logits of images that match their prompt are about 30 with OpenAI's weights, whose exp(logit_scale) is 100."""


@dataclass(frozen=True, kw_only=True)
class ClipSpec(ClipSimilaritySpec):
    """The CLIP and its batch size."""

    path: str = "openai/clip-vit-large-patch14"
    """Hub id or local directory of the model; `toy` is a tiny network of the same class with fixed random weights."""
    processor: str = "openai/clip-vit-large-patch14"
    """Hub id or local directory of the tokenizer and image processor; `toy` does not read it."""


class ClipRewardScorer(ClipSimilarityScorer):
    """exp(logit_scale) * cosine(image, prompt) / 30, in float32."""

    name = "clip"

    def __init__(self, *, config: ClipSpec = ClipSpec()) -> None:
        super().__init__(config)

    def scaled(self, cosine: Tensor) -> Tensor:
        return self.logits(cosine) / SCALE
