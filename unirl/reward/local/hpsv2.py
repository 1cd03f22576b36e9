"""Human Preference Score v2 and v2.1: a CLIP ViT-H-14 tuned on which of two pictures people prefer.

Wu et al. 2023, arXiv:2306.09341. The published checkpoints are in open_clip's layout and are read into transformers'
CLIPModel, which computes the same.
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
    """Which checkpoint, and how many pictures at a time."""

    path: str = "xswu/HPSv2"
    """A checkpoint, or the hub id or local directory that holds `file`; `toy` is a tiny CLIPModel, random weights."""
    file: str | None = "HPS_v2.1_compressed.pt"
    """The checkpoint (v2.0: HPS_v2_compressed.pt), pickled tensors or safetensors, in open_clip's layout.
    None: `path` holds a CLIPModel as transformers saves it."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or local directory of the architecture, tokenizer and image processor; not read by `toy`."""


class HPSv2RewardScorer(ClipSimilarityScorer):
    """cosine(image, prompt), in float32: about 0.2 to 0.35. The published tables show 100 times this.

    Tokens are those of open_clip, but for HTML entities in a prompt, which stay as they are written.
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
    """[B, 3, S, S] pictures [B, 3, H, W] with their longer edge scaled to S, in the middle of black.

    HPSv2's ResizeMaxSize on tensors: bicubic, with antialiasing as torchvision 0.17 and later do, not cut to [0, 1].
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
"""Modules of a transformer block: open_clip's name to that of transformers."""
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
"""What stands outside of blocks."""
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""Matrices that open_clip multiplies from the right."""


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of open_clip's CLIP under the names, and in the layout, of transformers' CLIPModel."""
    return {new: tensor for name, weight in weights.items() for new, tensor in _renamed(name, weight)}


def _renamed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name in TRANSPOSED:
        yield TRANSPOSED[name], weight.T.contiguous()
    elif ".resblocks." in name:
        yield from _of_block(name, weight)
    else:
        yield TOWERS.get(name, name), weight  # a name that nobody knows is refused when the model is assembled


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
