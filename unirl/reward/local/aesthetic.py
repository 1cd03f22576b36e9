"""The improved aesthetic predictor of LAION: how much people like a picture, whatever it shows.

A linear map of CLIP ViT-L/14's image embedding, learned from ratings of 1 to 10 (christophschuhmann/improved-aesthetic-
predictor, the model "sac+logos+ava1-l14-linearMSE"); the reward of DDPO, arXiv:2305.13301.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unirl.reward.local.shared.clip import clip_image_processor, toy_clip_config
from unirl.reward.local.shared.images import ImageScorer, ImageScorerSpec
from unirl.reward.local.shared.pretrained import fill, fixed_seed, load, read_weights


@dataclass(frozen=True, kw_only=True)
class AestheticSpec(ImageScorerSpec):
    """Which CLIP and which head, and how many pictures at a time."""

    path: str = "openai/clip-vit-large-patch14"
    """Hub id or local directory of the CLIP; `toy` is the same class, tiny, with fixed random weights."""
    head: str = "trl-lib/ddpo-aesthetic-predictor"
    """The head's file, or the hub id or local directory that holds aesthetic-model.pth; not read by `toy`."""


class AestheticNetwork(nn.Module):
    """Pictures [B, 3, S, S] as CLIP takes them to scores [B]: the head of the normalised image embedding."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        self.head = published_head(clip.config.projection_dim)

    def forward(self, pixels: Tensor) -> Tensor:
        embedding = self.clip(pixel_values=pixels).image_embeds
        scores: Tensor = self.head(nn.functional.normalize(embedding, dim=-1))[:, 0]
        return scores


class AestheticRewardScorer(ImageScorer):
    """The predicted rating, about 1 to 10, in float32. Prompts play no part."""

    name = "aesthetic"
    reads = ("images",)
    config: AestheticSpec

    def __init__(self, *, config: AestheticSpec = AestheticSpec()) -> None:
        super().__init__(config)

    def load_model(self) -> nn.Module:
        from transformers import CLIPVisionModelWithProjection

        if self.config.path == "toy":
            return toy_network()
        network = AestheticNetwork(load(CLIPVisionModelWithProjection, self.config.path, "config.path").float())
        weights = read_weights(self.config.head, "aesthetic-model.pth", "config.head")
        fill(network.head, {name.removeprefix("layers."): tensor for name, tensor in weights.items()}, "config.head")
        return network

    @property
    def image_processor(self) -> Any:
        network: Any = self.model
        return clip_image_processor(network.clip.config.image_size)

    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        scores: Tensor = self.model(pixels.to(self.device))
        return scores

    def objective(self, images: Tensor, prompts: Sequence[str] = ()) -> Tensor:
        """[B] the score of pictures [B, 3, H, W] in [0, 1] with its gradient; prompts play no part."""
        return super().objective(images, prompts)


def published_head(width: int) -> nn.Sequential:
    """The head [B, W] to [B, 1] of the aesthetic predictor and of ImageReward: linear maps, with nothing between them.

    W - 1024 - 128 - 64 - 16 - 1. Dropouts hold the places that they have in the published weights' names.
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


def toy_network() -> AestheticNetwork:
    """The predictor over the toy's CLIP, with fixed random weights."""
    from transformers import CLIPVisionModelWithProjection

    with fixed_seed():
        return AestheticNetwork(CLIPVisionModelWithProjection(toy_clip_config().vision_config))
