"""Human Preference Score v2 and v2.1: a CLIP ViT-H-14 fine-tuned on human choices between two images.

Wu et al. 2023, arXiv:2306.09341. The published checkpoints have open_clip's layout and are converted to transformers'
CLIPModel, which computes the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unirl.models.loading.hub import ModelSource
from unirl.reward.base import CLIP_H
from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec
from unirl.reward.local.shared.images import normalised
from unirl.reward.local.shared.pretrained import assemble, load, read_weights, renamed
from unirl.types.primitives import unit

if TYPE_CHECKING:
    from transformers import CLIPModel


@dataclass(frozen=True, kw_only=True)
class HPSv2Spec(ClipSimilaritySpec):
    path: ModelSource = "xswu/HPSv2"
    """A checkpoint file, or a hub id or local directory that holds `file`; `toy` is a tiny random CLIPModel."""
    file: str | None = "HPS_v2.1_compressed.pt"
    """The checkpoint (v2.0: HPS_v2_compressed.pt) in open_clip's layout, as pickled tensors or safetensors.
    None: `path` holds a CLIPModel saved by transformers."""
    processor: ModelSource = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or local directory of the architecture, tokenizer and image processor; `toy` does not read it."""


class HPSv2RewardScorer(ClipSimilarityScorer):
    """cosine(image, prompt), in float32, about 0.2 to 0.35. The published tables show 100 times this value.

    Tokens are those of open_clip, except that HTML entities in a prompt are not decoded.
    """

    cost = CLIP_H
    name = "hpsv2"
    config: HPSv2Spec

    def __init__(self, *, config: HPSv2Spec = HPSv2Spec()) -> None:
        super().__init__(config)

    def load_model(self) -> CLIPModel:
        from transformers import CLIPConfig, CLIPModel

        if self.config.path == "toy" or self.config.file is None:
            return super().load_model()
        architecture = load(CLIPConfig, self.config.processor, "config.processor")
        weights = from_open_clip(read_weights(self.config.path, self.config.file, "config.path"))
        return assemble(CLIPModel, architecture, weights, "config.path", torch.float32)

    def scaled(self, cosine: Tensor) -> Tensor:
        return cosine

    def pixels(self, images: Tensor) -> Tensor:
        processor = self.image_processor
        return normalised(letterboxed(unit(images.to(self.device)).float(), processor.crop_size["height"]), processor)

    def smooth_pixels(self, images: Tensor) -> Tensor:
        return self.pixels(images)


def letterboxed(images: Tensor, side: int) -> Tensor:
    """Returns [B, 3, S, S]: images [B, 3, H, W] with their longer edge scaled to S, centred on black.

    This is HPSv2's ResizeMaxSize on tensors: bicubic with antialiasing as in torchvision 0.17 and later, not clamped to
    [0, 1].
    """
    scale = side / max(images.shape[-2:])
    if scale != 1.0:
        size = [round(length * scale) for length in images.shape[-2:]]
        images = nn.functional.interpolate(images, size, mode="bicubic", antialias=True)
    down, across = (side - length for length in images.shape[-2:])
    return nn.functional.pad(images, (across // 2, across - across // 2, down // 2, down - down // 2))


NAMES = {
    r"^positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"^token_embedding\.": "text_model.embeddings.token_embedding.",
    r"^ln_final\.": "text_model.final_layer_norm.",
    r"^text_projection$": "text_projection.weight",
    r"^transformer\.resblocks\.": "text_model.encoder.layers.",
    r"^visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"^visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"^visual\.ln_pre\.": "vision_model.pre_layrnorm.",
    r"^visual\.ln_post\.": "vision_model.post_layernorm.",
    r"^visual\.proj$": "visual_projection.weight",
    r"^visual\.transformer\.resblocks\.": "vision_model.encoder.layers.",
    r"\.ln_(\d)\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
}
"""Names in open_clip and in transformers' CLIPModel."""
TRANSPOSED = ("text_projection", "visual.proj")
"""Matrices that open_clip stores transposed."""


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of an open_clip CLIP with the names and the layout of transformers' CLIPModel."""
    converted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        new = renamed(name, NAMES)  # `assemble` refuses an unknown name
        if ".in_proj_" in new:
            for letter, third in zip("qkv", weight.chunk(3), strict=True):
                converted[new.replace(".in_proj_", f".{letter}_proj.")] = third.contiguous()
        else:
            converted[new] = weight.T.contiguous() if name in TRANSPOSED else weight
    return converted
