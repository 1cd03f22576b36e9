"""The vision towers of OpenVLA: two Vision Transformers of timm, DINOv2 and SigLIP, by the names of their tensors.

Each gives the output of its second to last block, for the patches alone. So its last block, its last norm and its
pooling never run, and are not built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from unirl.models.policies.networks import resized

EPS = 1e-6
"""Added to the variance in the layer norms."""


@dataclass(frozen=True, kw_only=True)
class ViT:
    """The sizes of a Vision Transformer, which timm knows by a name and no file of the checkpoint has."""

    width: int
    depth: int
    """Blocks of the checkpoint. The last one is not built."""
    heads: int
    hidden: int
    """Width of the layer between the two of an MLP."""
    patch: int = 14
    registers: int = 0
    """Tokens beside the class token. 0: there is no class token, either."""
    layer_scale: bool = False
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TOWERS: Mapping[str, ViT] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": ViT(
        width=1024,
        depth=24,
        heads=16,
        hidden=4096,
        registers=4,
        layer_scale=True,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    "vit_so400m_patch14_siglip_224": ViT(width=1152, depth=27, heads=16, hidden=4304),
    "toy_patch14_reg4_dinov2": ViT(
        width=24, depth=3, heads=2, hidden=48, registers=4, layer_scale=True, mean=IMAGENET_MEAN, std=IMAGENET_STD
    ),
    "toy_patch14_siglip": ViT(width=32, depth=3, heads=2, hidden=40),
}
"""Sizes and normalisation of towers by their names in timm, and those of the toy."""


class VisionAttention(nn.Module):
    """Attention of every patch to every patch."""

    def __init__(self, sizes: ViT) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, sizes: ViT) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.width, sizes.hidden)
        self.fc2 = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        return self.fc2(gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A factor for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        return x * self.scale_factor


class VisionBlock(nn.Module):
    """A block with norms before its parts."""

    def __init__(self, sizes: ViT) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, eps=EPS)
        self.attn = VisionAttention(sizes)
        self.ls1: nn.Module = LayerScale(sizes.width) if sizes.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(sizes.width, eps=EPS)
        self.mlp = VisionMLP(sizes)
        self.ls2: nn.Module = LayerScale(sizes.width) if sizes.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbedding(nn.Module):
    """Patches of pixels as tokens."""

    def __init__(self, sizes: ViT) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, P, D]."""
        return self.proj(pixels).flatten(2).transpose(1, 2)


class VisionTower(nn.Module):
    """A Vision Transformer up to its second to last block."""

    def __init__(self, sizes: ViT, image_size: int) -> None:
        super().__init__()
        self.sizes, self.image_size = sizes, image_size
        self.num_patches = (image_size // sizes.patch) ** 2
        self.patch_embed = PatchEmbedding(sizes)
        self.pos_embed = nn.Parameter(torch.randn(1, self.num_patches, sizes.width) * 0.02)
        if sizes.registers:
            self.cls_token = nn.Parameter(torch.randn(1, 1, sizes.width) * 0.02)
            self.reg_token = nn.Parameter(torch.randn(1, sizes.registers, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.depth - 1))

    def forward(self, images: Tensor) -> Tensor:
        """Features [N, P, D] of the patches of images [N, 3, H, W] of levels from 0 to 255."""
        weight = self.patch_embed.proj.weight
        x = self.patch_embed(self.prepared(images).to(weight.dtype)) + self.pos_embed
        before = 0
        if self.sizes.registers:
            prefix = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(x), -1, -1)
            before = prefix.shape[1]
            x = torch.cat([prefix, x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, before:]

    def prepared(self, images: Tensor) -> Tensor:
        """[N, 3, side, side] fp32: resized to whole levels as PIL does it, then normalised."""
        levels = resized(images, self.image_size)
        mean, std = (levels.new_tensor(values)[:, None, None] for values in (self.sizes.mean, self.sizes.std))
        return (levels / 255 - mean) / std


class VisionBackbone(nn.Module):
    """Two towers over the same images, whose features are put side by side."""

    def __init__(self, names: Sequence[str], image_sizes: Sequence[int]) -> None:
        super().__init__()
        self.featurizer = VisionTower(TOWERS[names[0]], image_sizes[0])
        self.fused_featurizer = VisionTower(TOWERS[names[1]], image_sizes[1])
        self.width = self.featurizer.sizes.width + self.fused_featurizer.sizes.width

    def forward(self, images: Tensor) -> Tensor:
        """[N, P, width] from images [N, 3, H, W] of levels from 0 to 255."""
        return torch.cat([self.featurizer(images), self.fused_featurizer(images)], dim=2)


class Projector(nn.Module):
    """Features of patches as inputs of the language model."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """[N, P, vision_width] -> [N, P, width]."""
        return self.fc3(gelu(self.fc2(gelu(self.fc1(features)))))
