"""What scorers of pictures by a network share: the frame, and the pixels that the network is shown."""

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
"""Forward batches are multiples of this: on one CPU thread a row's bits then do not depend on the batch. On several,
the last bit depends on the row's place in it (2e-8 of a CLIP score); the same batch always gives the same bits."""


@dataclass(frozen=True, kw_only=True)
class ImageScorerSpec:
    """Which network, and how many pictures at a time."""

    path: str
    """Where the network is; `toy` is the same class, tiny, with fixed random weights."""
    batch_size: int = 8
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "batch_size": 4}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"{type(self).__name__}.batch_size must be >= 1, got {self.batch_size}")


class ImageScorer(LocalRewardBackend):
    """One number per picture and prompt, by a network in float32 that also gives the gradient."""

    name: ClassVar[str]
    """The component's name."""
    reads: tuple[str, ...] = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",), differentiable=True)
    config: ImageScorerSpec

    def __init__(self, config: ImageScorerSpec) -> None:
        super().__init__(device=config.device)
        self.config = config

    @property
    @abstractmethod
    def image_processor(self) -> Any:
        """The image processor of transformers that the network was published with."""

    def pixels(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] what the network is shown of images [B, 3, H, W] in [0, 1]."""
        pixels: Tensor = self.image_processor(as_pil(images), return_tensors="pt")["pixel_values"]
        return pixels

    def smooth_pixels(self, images: Tensor) -> Tensor:
        """The same without rounding to levels, with its gradient."""
        return clip_pixels(images, self.image_processor)

    @abstractmethod
    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the scores of pictures as `pixels` gives them."""

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts = request.images, request.prompts
        assert images is not None
        if prompts is None:
            prompts = [""] * len(request)
        scores = torch.empty(len(request))
        for chunk in padded_chunks(len(request), self.config.batch_size, ROWS):
            rows = list(chunk.rows)
            with torch.no_grad():
                answer = self.judge(self.pixels(images[rows]), [prompts[row] for row in rows]).cpu()
            scores[rows[: chunk.num_real]] = answer[: chunk.num_real]
        return single(self.name, scores)

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the score with its gradient; pictures of any size are scaled and cut as the published ones are."""
        return self.judge(self.smooth_pixels(images.float()), prompts)


def as_pil(pixels: Tensor) -> list[Any]:
    """PIL images of [B, 3, H, W] in [0, 1]."""
    from PIL import Image

    levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in levels]


def clip_pixels(images: Tensor, processor: Any) -> Tensor:
    """[B, 3, S, S] what CLIP's image processor makes of pictures [B, 3, H, W] in [0, 1], without rounding to levels.

    Bicubic with antialiasing to the shortest edge, along rows, then along columns, each cut to [0, 1]; the middle
    S x S, normalised. The processor rounds to 256 levels after either pass: its pixels differ by up to 1.2 levels.
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
    """(pictures - mean) / std per channel, with the constants of an image processor."""
    mean, std = (
        torch.tensor(v, device=images.device)[:, None, None] for v in (processor.image_mean, processor.image_std)
    )
    return (images - mean) / std


def clips(request: RewardRequest, at_least: int) -> Iterator[tuple[str, Tensor]]:
    """The sample id and the frames [F, 3, H, W] of every row.

    Raises:
        RewardError: 6002 naming the sample with fewer than `at_least` frames.
    """
    assert request.videos is not None
    bounds: Sequence[int] = request.videos.offsets.tolist()
    for sample, start, stop in zip(request.sample_ids, bounds[:-1], bounds[1:], strict=True):
        if stop - start < at_least:
            raise RewardError(
                f"sample {sample!r} is a clip of {stop - start} frames, and this reward needs at least {at_least}: "
                "set sampling.num_frames higher, or choose another reward"
            )
        yield sample, request.videos.frames[start:stop]


def evenly_spaced(count: int, chosen: int) -> list[int]:
    """The middles of `chosen` equal parts of 0 .. count - 1; all of them when there are no more than that."""
    if count <= chosen:
        return list(range(count))
    return [(2 * part + 1) * count // (2 * chosen) for part in range(chosen)]
