"""The base class of image scorers with a network, and the preprocessing of images and videos that scorers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import RewardError
from unirl.models.chunks import padded_chunks
from unirl.reward.base import Device, LocalRewardBackend, single
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

ROWS = 4
"""Batch sizes of forwards are multiples of this. On one CPU thread, a row then has the same bits in every batch; on
several threads, the last bit depends on the row's place in the batch (2e-8 of a CLIP score)."""


@dataclass(frozen=True, kw_only=True)
class ImageScorerSpec:
    """The network and its batch size."""

    path: str
    """Hub id, local directory or file of the network; `toy` is a tiny network of the same class with fixed random
    weights."""
    batch_size: int = 8
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "batch_size": 4}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"{type(self).__name__}.batch_size must be >= 1, got {self.batch_size}")


class ImageScorer(LocalRewardBackend):
    """Scores an image and its prompt by a network in float32, also with a gradient."""

    name: ClassVar[str]
    """Name of the component."""
    reads: tuple[str, ...] = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",), differentiable=True)
    config: ImageScorerSpec

    def __init__(self, config: ImageScorerSpec) -> None:
        super().__init__(device=config.device)
        self.config = config

    @property
    @abstractmethod
    def image_processor(self) -> Any:
        """The image processor of transformers that was published with the network."""

    def pixels(self, images: Tensor) -> Tensor:
        """Returns the network's input [B, 3, S, S] for images [B, 3, H, W] in [0, 1]."""
        pixels: Tensor = self.image_processor(as_pil(images), return_tensors="pt")["pixel_values"]
        return pixels

    def smooth_pixels(self, images: Tensor) -> Tensor:
        """Returns the same input as `pixels`, differentiable and without rounding to uint8 levels."""
        return clip_pixels(images, self.image_processor)

    @abstractmethod
    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the scores [B] of images that `pixels` has preprocessed."""

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts = request.images, request.prompts
        assert images is not None
        if prompts is None:
            prompts = [""] * len(request)
        scores = torch.empty(len(request))
        for chunk in padded_chunks(len(request), self.config.batch_size, ROWS):
            rows = list(chunk.rows)
            with torch.no_grad():
                chunk_scores = self.judge(self.pixels(images[rows]), [prompts[row] for row in rows]).cpu()
            scores[rows[: chunk.num_real]] = chunk_scores[: chunk.num_real]
        return single(self.name, scores)

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the differentiable score [B]. Images of any size are scaled and cropped as in `score`."""
        return self.judge(self.smooth_pixels(images.float()), prompts)


def as_pil(pixels: Tensor) -> list[Any]:
    """Returns images [B, 3, H, W] in [0, 1] as PIL images."""
    from PIL import Image

    levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in levels]


def clip_pixels(images: Tensor, processor: Any) -> Tensor:
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


def normalised(images: Tensor, processor: Any) -> Tensor:
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
