"""The improved aesthetic predictor of LAION: a predicted rating of an image without its prompt.

It is a linear map of CLIP ViT-L/14's image embedding, trained on ratings of 1 to 10 (christophschuhmann/improved-
aesthetic-predictor, the model "sac+logos+ava1-l14-linearMSE"), and a reward of DDPO, arXiv:2305.13301.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from unirl.models.loading.hub import ModelSource
from unirl.reward.base import CLIP_L
from unirl.reward.local.shared.clip import clip_image_processor, toy_clip_config
from unirl.reward.local.shared.images import ImageScorer, ImageScorerSpec
from unirl.reward.local.shared.pretrained import fill, fixed_seed, load, read_weights

if TYPE_CHECKING:
    from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection


@dataclass(frozen=True, kw_only=True)
class AestheticSpec(ImageScorerSpec):
    path: ModelSource = "openai/clip-vit-large-patch14"
    head: ModelSource = "trl-lib/ddpo-aesthetic-predictor"
    """The file of the head, or a hub id or local directory that holds aesthetic-model.pth; `toy` does not read it."""


class AestheticNetwork(nn.Module):
    """Maps images [B, 3, S, S], preprocessed for CLIP, to scores [B] by the head on the normalised image embedding."""

    def __init__(self, clip: CLIPVisionModelWithProjection) -> None:
        super().__init__()
        self.clip = clip
        self.head = published_head(clip.config.projection_dim)

    def forward(self, pixels: Tensor) -> Tensor:
        embedding = self.clip(pixel_values=pixels).image_embeds
        scores: Tensor = self.head(nn.functional.normalize(embedding, dim=-1))[:, 0]
        return scores


class AestheticRewardScorer(ImageScorer[AestheticNetwork]):
    """The predicted rating, about 1 to 10, in float32. The prompt has no effect."""

    cost = CLIP_L
    name = "aesthetic"
    reads = ("images",)
    config: AestheticSpec

    def __init__(self, *, config: AestheticSpec = AestheticSpec()) -> None:
        super().__init__(config)

    def load_model(self) -> AestheticNetwork:
        from transformers import CLIPVisionModelWithProjection

        if self.config.path == "toy":
            with fixed_seed():
                return AestheticNetwork(CLIPVisionModelWithProjection(toy_clip_config().vision_config))
        network = AestheticNetwork(load(CLIPVisionModelWithProjection, self.config.path, "config.path").float())
        weights = read_weights(self.config.head, "aesthetic-model.pth", "config.head")
        fill(network.head, {name.removeprefix("layers."): tensor for name, tensor in weights.items()}, "config.head")
        return network

    @property
    def image_processor(self) -> CLIPImageProcessorPil:
        return clip_image_processor(self.model.clip.config.image_size)

    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        scores: Tensor = self.model(pixels.to(self.device))
        return scores


def published_head(width: int) -> nn.Sequential:
    """Returns the head of the aesthetic predictor and of ImageReward, which maps [B, W] to [B, 1].

    It consists of linear maps W - 1024 - 128 - 64 - 16 - 1 without activations. The dropouts keep the indices in the
    names of the published weights.
    """
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )
