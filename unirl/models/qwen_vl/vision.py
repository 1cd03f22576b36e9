"""How Qwen-VL reads images: an image becomes patches, patches become features of the vision tower, and each feature
replaces the embedding of one image token.

Patches stay uint8 until they are on the device, and the copies of a still image as several frames are not stored: an
eighth of the memory of the processor's output, with the same values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unirl.config.errors import InvalidValueError
from unirl.models.images import read_image
from unirl.models.language.policy import TokenPolicy
from unirl.types.batch import bounds_of
from unirl.types.conditions import ImagePatches, PatchGrid, PromptImageInputs
from unirl.types.device import to_device

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, Qwen2VLImageProcessorPil
    from transformers.modeling_outputs import BaseModelOutput

IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
"""One image in a text without a chat template."""
IMAGE_TOKEN = -1
"""Stands in prompts for each token of an image. An image placeholder that the policy itself samples is not an image."""
CHANNELS = 3


# Images to patches


@dataclass(frozen=True)
class PixelNormalizer:
    """Turns uint8 patches into the input of the vision tower: (level / 255 - mean) / std for red, green and blue."""

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, patches: Tensor, frames: int) -> Tensor:
        """[N, 3 * frames * p * p] fp32 from the patches [N, 3 * p * p] of an image, repeated for each frame."""
        levels = patches.view(len(patches), CHANNELS, -1).float() / 255
        mean, std = (to_device(torch.tensor(v), patches.device)[:, None] for v in (self.mean, self.std))
        values = (levels - mean) / std
        return values[:, :, None].expand(-1, -1, frames, -1).reshape(len(patches), -1)


PatchedImage = tuple[Tensor, PatchGrid]
"""The patches [N, 3 * p * p] uint8 of one image, and their grid."""


class ImagePatcher:
    """Turns image files into patches with the image processor of a checkpoint."""

    def __init__(
        self, processor: Qwen2VLImageProcessorPil, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """Takes the bounds of `QwenVLPipeline`."""
        self.processor = processor
        self.min_pixels = processor.size["shortest_edge"] if min_pixels is None else min_pixels
        self.max_pixels = processor.size["longest_edge"] if max_pixels is None else max_pixels
        self.normalizer = PixelNormalizer(tuple(processor.image_mean), tuple(processor.image_std))
        token = (processor.patch_size * processor.merge_size) ** 2
        if not token <= self.min_pixels <= self.max_pixels:
            raise InvalidValueError(
                f"pipeline.min_pixels={self.min_pixels} and max_pixels={self.max_pixels}: a token of this model is "
                f"{token} pixels, and {token} <= min_pixels <= max_pixels must hold"
            )

    def read(self, path: str) -> PatchedImage:
        """The patches of the image in a file. Raises DataError (4003) if it cannot be read."""
        return self.cut(read_image(path))

    def cut(self, image: Image) -> PatchedImage:
        """The patches of an RGB image, after it is scaled into the bounds."""
        batch = self.processor(
            images=[image],
            size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )
        frames, rows, columns = batch["image_grid_thw"][0].tolist()
        values = batch["pixel_values"]
        patches = values.view(len(values), CHANNELS, self.processor.temporal_patch_size, -1)[:, :, 0]
        return patches.flatten(1).to(torch.uint8), (frames, rows, columns)

    def join(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        """Levels [3, H, W] uint8 of the scaled image whose patches these are. `cut` gives the same patches again.

        The patches of a token are adjacent: they are [rows, columns, side, side, 3, patch, patch] with `side` patches
        along the sides of a token.
        """
        _, rows, columns = grid
        side, size = self.processor.merge_size, self.processor.patch_size
        split = patches.view(rows // side, columns // side, side, side, CHANNELS, size, size)
        return split.permute(4, 0, 2, 5, 1, 3, 6).reshape(CHANNELS, rows * size, columns * size)

    @property
    def patch_width(self) -> int:
        """Number of values in a patch."""
        return CHANNELS * int(self.processor.patch_size) ** 2

    def num_tokens(self, grid: PatchGrid) -> int:
        """Number of tokens of an image in the language model."""
        return int(math.prod(grid) // self.processor.merge_size**2)


def image_text_processor(
    image_processor: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase
) -> ProcessorMixin:
    """Qwen's own processor of images and texts, without the part for videos, which needs torchvision.

    Its class has the name of Qwen's own, so that other libraries can load a model that is saved with it.
    """
    from transformers import Qwen2VLProcessor

    class ImageTextProcessor(Qwen2VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            """The names of its components."""
            return ["image_processor", "tokenizer"]

    ImageTextProcessor.__name__ = Qwen2VLProcessor.__name__
    ImageTextProcessor.__module__ = Qwen2VLProcessor.__module__
    return ImageTextProcessor(image_processor, tokenizer)


def toy_image_processor() -> Qwen2VLImageProcessorPil:
    """Qwen's own image processor, for toy images of 16 x 16 to 32 x 32 pixels, which are 4 to 16 tokens."""
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)


# Prompts with images


def expand_images(tokens: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """`tokens` with each image's token replaced by as many `IMAGE_TOKEN` as the image has tokens. Raises ValueError."""
    num_placeholders = sum(token == image_token for token in tokens)
    if num_placeholders != len(counts):
        raise ValueError(
            f"the tokens hold {num_placeholders} image placeholders for {len(counts)} images: the text itself contains "
            "the model's placeholder, or its chat template leaves images out"
        )
    remaining = iter(counts)
    return [new for token in tokens for new in ([IMAGE_TOKEN] * next(remaining) if token == image_token else [token])]


def collapse_images(tokens: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """The inverse of `expand_images`: `tokens` with one `image_token` for each image of `counts` tokens."""
    collapsed: list[int] = []
    remaining, place = iter(counts), 0
    while place < len(tokens):
        is_image = tokens[place] == IMAGE_TOKEN
        collapsed.append(image_token if is_image else tokens[place])
        place += next(remaining) if is_image else 1
    return collapsed


def rope_positions(network: nn.Module, tokens: Sequence[int], grids: Sequence[PatchGrid], image_token: int) -> Tensor:
    """[P, 3] (time, row, column) of a prompt's tokens, by the network's own rule."""
    ids = torch.tensor([tokens])
    is_image = ids == IMAGE_TOKEN
    model: PreTrainedModel = network.get_submodule("model")
    positions, _ = model.get_rope_index(
        ids.where(~is_image, image_token),
        mm_token_type_ids=is_image.int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    return positions[:, 0].T.contiguous()


def pack_images(images: Sequence[PatchedImage], width: int) -> ImagePatches:
    """The images of one prompt, possibly none; `width` is the number of values in a patch."""
    patches = torch.cat([torch.zeros(0, width, dtype=torch.uint8), *(patches for patches, _ in images)])
    return ImagePatches(
        patches=patches,
        grids=[tuple(grid for _, grid in images)],
        digests=[tuple(hashlib.blake2b(patches.numpy().data, digest_size=16).hexdigest() for patches, _ in images)],
        offsets=bounds_of([len(patches)]),
    )


def split_images(images: ImagePatches) -> list[PatchedImage]:
    """Each image, in the order of the rows."""
    grids = [grid for row in images.grids for grid in row]
    return list(zip(images.patches.split([math.prod(grid) for grid in grids]), grids, strict=True))


# The network


@dataclass(frozen=True)
class ImageFeatures:
    """The output of the vision tower for one or more images, in order."""

    features: Tensor  # [M, D]
    deepstack: tuple[Tensor, ...] = ()  # [M, D] each, added after the first layers of the decoder (DeepStack)

    @staticmethod
    def concat(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """The features of all images of `parts`, in order."""
        deepstack = tuple(torch.cat(layer) for layer in zip(*(part.deepstack for part in parts), strict=True))
        return ImageFeatures(torch.cat([part.features for part in parts]), deepstack)


class QwenVLPolicy(TokenPolicy):
    """Qwen2.5-VL. Each image runs through the vision tower alone, and equal images run once."""

    normalizer: PixelNormalizer
    """Set by the bundle, from the checkpoint's image processor."""

    def decoder(self) -> PreTrainedModel:
        return self.get_submodule("model.language_model")

    def tower(self) -> nn.Module:
        """The vision tower."""
        return self.get_submodule("model.visual")

    def embeds(self, tokens: Tensor, images: PromptImageInputs | None) -> tuple[Tensor, dict[str, object]]:
        assert images is None or isinstance(images, ImagePatches)
        embeds = self.decoder().embed_tokens(tokens.clamp(min=0)[None])
        if images is None or not any(images.grids):
            return embeds + self._zero_gradient(tokens), {}
        features = self._encode_images(images)
        is_image = (tokens == IMAGE_TOKEN)[None]
        torch._assert_async(is_image.sum() == len(features.features), "as many image tokens as features")
        embeds = embeds.masked_scatter(is_image[..., None], features.features.to(embeds.dtype))
        return embeds, self.decoder_inputs(is_image, features)

    def decoder_inputs(self, is_image: Tensor, features: ImageFeatures) -> dict[str, object]:
        """Further arguments of the decoder, for images at `is_image` [1, N]."""
        return {}

    def encode_image(self, patches: Tensor, grid: PatchGrid) -> ImageFeatures:
        """Runs one image through the vision tower."""
        tower, config = self.tower(), self.config.vision_config
        pixels = self.normalizer(patches, config.temporal_patch_size)
        pixels = pixels.to(next(tower.parameters()).dtype)
        grids = torch.tensor([grid])
        # Bounds stay on the CPU, since PyTorch's attention splits by numbers of the host.
        inputs = {
            name: tensor if name.startswith("cu_") else to_device(tensor, patches.device)
            for name, tensor in self.grid_inputs(grids).items()
        }
        return self.features_of(tower(pixels, grid_thw=grids, return_dict=True, **inputs))

    def grid_inputs(self, grids: Tensor) -> dict[str, Tensor]:
        """The inputs that the tower derives from the grids of images [n, 3], computed on the CPU and then copied."""
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

        config = self.config.vision_config
        side = config.spatial_merge_size
        window_index, cu_window_seqlens = get_vision_window_index(grids, side, config.window_size, config.patch_size)
        return {
            "position_ids": get_vision_position_ids(grids, side),
            "cu_seqlens": get_vision_cu_seqlens(grids),
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
        }

    def features_of(self, out: BaseModelOutput) -> ImageFeatures:
        """The features in the tower's output."""
        return ImageFeatures(out.pooler_output)

    def _encode_images(self, images: ImagePatches) -> ImageFeatures:
        digests = [digest for row in images.digests for digest in row]
        distinct: dict[tuple[PatchGrid, str], ImageFeatures] = {}
        parts = []
        for digest, (patches, grid) in zip(digests, split_images(images), strict=True):
            key = grid, digest
            if key not in distinct:
                distinct[key] = self.encode_image(patches, grid)
            parts.append(distinct[key])
        return ImageFeatures.concat(parts)

    def _zero_gradient(self, tokens: Tensor) -> Tensor | float:
        """0. If the tower is trained, with a gradient of 0 to it, so that all ranks reduce the same gradients."""
        if not (torch.is_grad_enabled() and next(self.tower().parameters()).requires_grad):
            return 0.0
        config = self.config.vision_config
        side = config.spatial_merge_size
        blank = torch.zeros(side * side, CHANNELS * config.patch_size**2, device=tokens.device)
        features = self.encode_image(blank, (1, side, side))
        return 0.0 * (features.features.sum() + sum(layer.sum() for layer in features.deepstack))


class DeepstackPolicy(QwenVLPolicy):
    """Qwen3-VL. The first layers of the decoder also read middle layers of the tower (arXiv:2406.04334)."""

    def decoder_inputs(self, is_image: Tensor, features: ImageFeatures) -> dict[str, object]:
        return {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(features.deepstack)}

    def features_of(self, out: BaseModelOutput) -> ImageFeatures:
        return ImageFeatures(out.pooler_output, tuple(out.deepstack_features))

    def grid_inputs(self, grids: Tensor) -> dict[str, Tensor]:
        from transformers.vision_utils import (
            get_vision_cu_seqlens,
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
        )

        tower, side = self.tower(), self.config.vision_config.spatial_merge_size
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=side,
        )
        return {
            "position_ids": get_vision_position_ids(grids, side),
            "cu_seqlens": get_vision_cu_seqlens(grids),
            "interp_indices": indices,
            "interp_weights": weights,
        }
