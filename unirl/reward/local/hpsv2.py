"""Human Preference Score v2 and v2.1: a CLIP ViT-H-14 fine-tuned on human choices between two images.

Wu et al. 2023, arXiv:2306.09341. The published checkpoints have open_clip's layout and are converted to transformers'
CLIPModel, which computes the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.reward.local.shared.clip import ClipSimilarityScorer, ClipSimilaritySpec
from unirl.reward.local.shared.images import normalised
from unirl.reward.local.shared.pretrained import assemble, load, read_weights


@dataclass(frozen=True, kw_only=True)
class HPSv2Spec(ClipSimilaritySpec):
    """The checkpoint and its batch size."""

    path: str = "xswu/HPSv2"
    """A checkpoint file, or a hub id or local directory that holds `file`; `toy` is a tiny random CLIPModel."""
    file: str | None = "HPS_v2.1_compressed.pt"
    """The checkpoint (v2.0: HPS_v2_compressed.pt) in open_clip's layout, as pickled tensors or safetensors.
    None: `path` holds a CLIPModel saved by transformers."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or local directory of the architecture, tokenizer and image processor; `toy` does not read it."""


class HPSv2RewardScorer(ClipSimilarityScorer):
    """cosine(image, prompt), in float32, about 0.2 to 0.35. The published tables show 100 times this value.

    Tokens are those of open_clip, except that HTML entities in a prompt are not decoded.
    """

    name = "hpsv2"
    config: HPSv2Spec

    def __init__(self, *, config: HPSv2Spec = HPSv2Spec()) -> None:
        super().__init__(config)

    def load_model(self) -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        if self.config.path == "toy" or self.config.file is None:
            return super().load_model()
        architecture = load(CLIPConfig, self.config.processor, "config.processor")
        weights = from_open_clip(read_weights(self.config.path, self.config.file, "config.path"))
        model: nn.Module = assemble(CLIPModel, architecture, weights, "config.path", torch.float32)
        return model

    def scaled(self, cosine: Tensor) -> Tensor:
        return cosine

    def pixels(self, images: Tensor) -> Tensor:
        processor = self.image_processor
        return normalised(letterboxed(images.float(), processor.crop_size["height"]), processor)

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


BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
"""Modules of a transformer block, by their names in open_clip and in transformers."""
TOWERS = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
"""Weights outside of transformer blocks, by their names in open_clip and in transformers."""
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""Matrices that open_clip stores transposed."""


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of an open_clip CLIP with the names and the layout of transformers' CLIPModel."""
    return {new: tensor for name, weight in weights.items() for new, tensor in _renamed(name, weight)}


def _renamed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name in TRANSPOSED:
        yield TRANSPOSED[name], weight.T.contiguous()
    elif ".resblocks." in name:
        yield from _of_block(name, weight)
    else:
        yield TOWERS.get(name, name), weight  # `assemble` refuses an unknown name


def _of_block(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    tower = "vision_model" if name.startswith("visual.") else "text_model"
    number, _, rest = name.partition(".resblocks.")[2].partition(".")
    prefix = f"{tower}.encoder.layers.{number}"
    if rest.startswith("attn.in_proj_"):
        kind = rest.removeprefix("attn.in_proj_")
        for letter, third in zip("qkv", weight.chunk(3), strict=True):
            yield f"{prefix}.self_attn.{letter}_proj.{kind}", third.contiguous()
        return
    module, _, kind = rest.rpartition(".")
    yield f"{prefix}.{BLOCK.get(module, module)}.{kind}", weight
