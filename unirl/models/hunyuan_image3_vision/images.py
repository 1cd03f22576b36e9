"""Images in prompts of HunyuanImage-3: encoded once by frozen modules, and placed among the tokens of a prompt.

    image --scaled to the nearest of the model's sizes, cropped--> VAE --> latents [C, h, w]
          --scaled to at most M patches, padded with zeros------> vision tower --> features [M, D]

    tokens      <boi>  size  ratio  <timestep>  h w latents  <joint_img_sep>  M features  <eoi>
    positions     s    s+1    s+2      s+3        a grid        s+4+h w         a grid     ...
    attention   causal ...............       | latents, separator and features see each other | causal

A grid of rows and columns is centred in the places of its tokens (see `image_positions`). Features of padding follow
the grid of the others, at their places in the sequence. The network reads them too, as in the published code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from unirl.config.errors import InvalidValueError
from unirl.models.hunyuan_image3.packing import image_positions
from unirl.models.hunyuan_image3.prompts import IMAGE, PromptFormat, Size, nearest_ratio
from unirl.models.hunyuan_image3.vae import ImageVAE
from unirl.models.hunyuan_image3_vision.network import CLEAN_TIMESTEP, FEATURE, LATENT
from unirl.types.batch import bounds_of
from unirl.types.conditions import EncodedImages, PackedVectors, Span
from unirl.types.device import to_device, to_host

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import Siglip2ImageProcessorPil

SECTION_MARKS = 6
"""Tokens of an image in a prompt beside its latents and features."""


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One image as the network reads it, in main memory."""

    latents: Tensor  # [C, h, w] fp32
    features: Tensor  # [M, D]
    grid: tuple[int, int]
    """Rows and columns of the patches of the vision tower. The features of further ones are those of padding."""
    ratio: int
    """The number of the token of its ratio."""
    digest: str

    @property
    def num_bytes(self) -> int:
        """Bytes in main memory."""
        return self.latents.nbytes + self.features.nbytes


class ImageReader:
    """Encodes images with the frozen VAE and the frozen vision tower, one at a time."""

    components = ("vae", "vision_model")

    def __init__(
        self, vae: ImageVAE, tower: nn.Module, processor: Siglip2ImageProcessorPil, format: PromptFormat, size: int
    ) -> None:
        """
        Args:
            size: pixels along each side of a square image for the VAE.
        """
        self.scale: int = vae.vae.config["ffactor_spatial"]
        if size % self.scale or not 0 < size <= format.base_size:
            near = min(max(size // self.scale, 1) * self.scale, format.base_size)
            raise InvalidValueError(
                f"pipeline.condition_size={size} must be a multiple of {self.scale}, the pixels of a latent along one "
                f"side, and at most {format.base_size}, the size of the model. Use {near}"
            )
        self.vae = vae
        self.tower: Any = tower
        self.processor = processor
        self.format = format
        self.size = size

    def encode(self, image: Image) -> EncodedImage:
        """The latents and features of an RGB image."""
        ratio = nearest_ratio(self.format.sizes, image.height / image.width)
        pixels = pixels_of(covering(image, self.size_of(ratio)))
        weight = next(self.tower.parameters())
        batch = self.processor(images=[image], return_tensors="pt")
        patches, mask, shapes = (
            to_device(batch[name], weight.device) for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")
        )
        with torch.no_grad():
            [latents] = self.vae.encode(to_device(pixels[None], weight.device))
            [states] = self.tower(
                pixel_values=patches.to(weight.dtype), pixel_attention_mask=mask, spatial_shapes=shapes
            ).last_hidden_state
        latents, states = to_host([latents, states])
        rows, columns = batch["spatial_shapes"][0].tolist()
        return EncodedImage(latents, states, (rows, columns), ratio, digest_of(image))

    def size_of(self, ratio: int) -> Size:
        """Height and width for the VAE: those of the model times `size` / its base, in multiples of a latent."""
        factor = self.size / self.format.base_size / self.scale
        height, width = (self.scale * max(1, round(side * factor)) for side in self.format.sizes[ratio])
        return height, width

    def section(self, image: EncodedImage) -> list[int]:
        """The tokens of an image in a prompt."""
        *begin, _ = self.format.header_of(image.ratio)
        sep, end = (self.format.token(mark) for mark in ("<joint_img_sep>", "<eoi>"))
        num_latents = image.latents[0].numel()
        return [*begin, CLEAN_TIMESTEP, *[LATENT] * num_latents, sep, *[FEATURE] * len(image.features), end]


def covering(image: Image, size: Size) -> Image:
    """The image scaled to the smallest size that covers (height, width), and cropped at its centre (Lanczos)."""
    from PIL.Image import Resampling

    height, width = size
    if image.height * width < height * image.width:  # wider than the size
        scaled = (round(height / image.height * image.width), height)
    else:
        scaled = (width, round(width / image.width * image.height))
    left, top = (round((own - wanted) / 2) for own, wanted in zip(scaled, (width, height), strict=True))
    return image.resize(scaled, Resampling.LANCZOS).crop((left, top, left + width, top + height))


def pixels_of(image: Image) -> Tensor:
    """Pixels [3, H, W] in [0, 1] of an RGB image."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)


def digest_of(image: Image) -> str:
    """Hash of the pixels of an image, 32 characters."""
    return hashlib.blake2b(image.tobytes(), digest_size=16, key=repr(image.size).encode()).hexdigest()


@dataclass(frozen=True)
class PlacedPrompt:
    """The tokens of a prompt with its images."""

    tokens: list[int]
    positions: Tensor  # [P, 2] int64, row and column
    spans: tuple[Span, ...]
    """The tokens of each image that see each other."""


def placed(tokens: Sequence[int], images: Sequence[EncodedImage], reader: ImageReader) -> PlacedPrompt:
    """A prompt with its images in the places of `IMAGE`. Raises ValueError if there are not as many of these."""
    places = sum(token == IMAGE for token in tokens)
    if places != len(images):
        raise ValueError(f"the tokens of the prompt have {places} places for its {len(images)} images")
    left = iter(images)
    result: list[int] = []
    grids: list[tuple[int, Tensor]] = []
    spans: list[Span] = []
    for token in tokens:
        if token != IMAGE:
            result.append(token)
            continue
        image = next(left)
        section = reader.section(image)
        start = len(result) + section.index(LATENT)
        after = start + image.latents[0].numel() + 1  # a separator stands before the features
        grids.append((start, image_positions(start, *image.latents.shape[1:])))
        grids.append((after, image_positions(after, *image.grid)))
        spans.append((start, after + len(image.features)))
        result += section
    positions = torch.arange(len(result))[:, None].repeat(1, 2)
    for start, grid in grids:
        positions[start : start + len(grid)] = grid
    return PlacedPrompt(result, positions, tuple(spans))


def packed_images(rows: Sequence[Sequence[EncodedImage]]) -> EncodedImages:
    """The images of each row. Every row has at least one."""
    return EncodedImages(
        latents=_packed([[image.latents.flatten(1).T for image in images] for images in rows]),
        features=_packed([[image.features for image in images] for images in rows]),
        sizes=[tuple((image.latents.shape[1], image.latents.shape[2]) for image in images) for images in rows],
        digests=[tuple(image.digest for image in images) for images in rows],
    )


def _packed(rows: Sequence[Sequence[Tensor]]) -> PackedVectors:
    """The vectors of each row, of which each tensor [N, D] has some."""
    offsets = bounds_of([sum(map(len, row)) for row in rows])
    return PackedVectors(values=torch.cat([part for row in rows for part in row]), offsets=offsets)
