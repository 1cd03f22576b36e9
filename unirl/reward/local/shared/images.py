"""The base class of image scorers with a network, and the preprocessing of images and videos that scorers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from unirl.config.errors import RewardError
from unirl.models.chunks import map_chunks
from unirl.models.loading.hub import ModelSource
from unirl.reward.base import Device, LocalRewardBackend, ModelT, single
from unirl.reward.client.encoding import uint8_levels
from unirl.reward.local.shared.resize import clip_input, level_values
from unirl.types.device import to_device
from unirl.types.primitives import levels_of
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor

ROWS = 4
"""Batch sizes of forwards are multiples of this. On one CPU thread, a row then has the same bits in every batch; on
several threads, the last bit depends on the row's place in the batch (2e-8 of a CLIP score)."""


@dataclass(frozen=True, kw_only=True)
class ImageScorerSpec:
    """The network and its batch size."""

    path: ModelSource
    """Hub id, local directory or file of the network; `toy` is a tiny network of the same class with fixed random
    weights."""
    batch_size: int = 8
    """Samples per forward pass."""
    device: Device = "auto"
    """auto = a GPU if there is one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the network's matrix products in bfloat16, which GPUs do many times faster. Scores move a little, so
    that images with almost equal scores may change places."""

    toy: ClassVar[dict[str, object]] = {"path": "toy", "batch_size": 4}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"{type(self).__name__}.batch_size must be >= 1, got {self.batch_size}")


class ImageScorer(LocalRewardBackend[ModelT]):
    """Scores an image and its prompt by a network with float32 weights, also with a gradient."""

    name: ClassVar[str]
    """Name of the component."""
    reads: tuple[str, ...] = ("prompts", "images")
    reads_levels = True
    capabilities = Capabilities(modalities=("image",), differentiable=True)
    config: ImageScorerSpec

    def __init__(self, config: ImageScorerSpec) -> None:
        super().__init__(device=config.device)
        self.config = config

    @property
    @abstractmethod
    def image_processor(self) -> BaseImageProcessor:
        """The image processor of transformers that was published with the network."""

    def pixels(self, images: Tensor) -> Tensor:
        """Returns the network's input [B, 3, S, S] for images [B, 3, H, W], uint8 or in [0, 1].

        On a CPU, Pillow itself is the fastest. On another device, the same bits are computed there.
        """
        if self.device.type == "cpu":
            pixels: Tensor = self.image_processor(as_pil(images), return_tensors="pt")["pixel_values"]
            return pixels
        return clip_input(levels_of(to_device(images, self.device)), self.image_processor, self.level_values)

    @cached_property
    def level_values(self) -> Tensor:
        """The network's input for each of 256 levels of each channel, [3, 256]."""
        return level_values(self.image_processor).to(self.device)

    def smooth_pixels(self, images: Tensor) -> Tensor:
        """Returns the same input as `pixels`, differentiable and without rounding to uint8 levels."""
        return clip_pixels(images, self.image_processor)

    @abstractmethod
    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the scores [B] of images that `pixels` has preprocessed."""

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts = request.images, request.prompts or [""] * len(request)
        assert images is not None

        @torch.no_grad()
        def score_rows(rows: Tensor) -> Tensor:
            pixels = self.pixels(images[rows])
            with self.autocast():
                return self.judge(pixels, [prompts[row] for row in rows.tolist()]).float().cpu()

        return single(self.name, map_chunks(score_rows, torch.arange(len(request)), self.config.batch_size, ROWS))

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the differentiable score [B]. Images of any size are scaled and cropped as in `score`."""
        pixels = self.smooth_pixels(images.float())
        with self.autocast():
            return self.judge(pixels, prompts).float()

    def autocast(self) -> torch.autocast:
        """The precision of the network's matrix products."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bf16")


def as_pil(images: Iterable[Tensor]) -> list[Image]:
    """Returns images [3, H, W], uint8 or in [0, 1], as PIL images."""
    from PIL import Image

    return [Image.fromarray(uint8_levels(image)) for image in images]


def clip_pixels(images: Tensor, processor: BaseImageProcessor) -> Tensor:
    """Returns [B, 3, S, S]: the output of CLIP's image processor for images [B, 3, H, W] in [0, 1], without rounding.

    The shortest edge is scaled by bicubic interpolation with antialiasing, first along rows and then along columns,
    each time clamped to [0, 1]. The centre S x S is cropped and normalised. The processor rounds to 256 levels after
    each of the two passes, so that its pixels differ by up to 1.2 levels.
    """
    edge, side = processor.size["shortest_edge"], processor.crop_size["height"]
    height, width = images.shape[-2:]
    if min(height, width) != edge:
        tall, wide = (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)
        for size in ((height, wide), (tall, wide)):
            images = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(0.0, 1.0)
    top, left = ((length - side) // 2 for length in images.shape[-2:])
    return normalised(images[..., top : top + side, left : left + side], processor)


def normalised(images: Tensor, processor: BaseImageProcessor) -> Tensor:
    """Returns (images - mean) / std per channel, with the constants of an image processor."""
    mean, std = (
        torch.tensor(v, device=images.device)[:, None, None] for v in (processor.image_mean, processor.image_std)
    )
    return (images - mean) / std


def video_frames(request: RewardRequest, at_least: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the sample id and the frames [F, 3, H, W] of every row.

    Raises:
        RewardError: 6002 a video has fewer than `at_least` frames; the message names the sample.
    """
    assert request.videos is not None
    bounds: Sequence[int] = request.videos.offsets.tolist()
    for sample, start, stop in zip(request.sample_ids, bounds[:-1], bounds[1:], strict=True):
        if stop - start < at_least:
            raise RewardError(
                f"sample {sample!r} is a video of {stop - start} frames, and this reward needs at least {at_least}: "
                "set sampling.num_frames higher, or choose another reward"
            )
        yield sample, request.videos.frames[start:stop]


def evenly_spaced(count: int, chosen: int) -> list[int]:
    """Returns the middles of `chosen` equal parts of 0 .. count - 1, or all indices if `count` is not larger."""
    if count <= chosen:
        return list(range(count))
    return [(2 * part + 1) * count // (2 * chosen) for part in range(chosen)]
