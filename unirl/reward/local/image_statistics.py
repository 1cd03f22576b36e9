"""Rewards that are a statistic of an image: the file size, as in DDPO (arXiv:2305.13301, section 5), and brightness."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.reward.base import RewardScorer, single
from unirl.reward.client.encoding import uint8_levels
from unirl.types.primitives import unit
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


@dataclass(frozen=True, kw_only=True)
class JpegSpec:
    quality: int = 95
    """JPEG quality, 1 to 95."""

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 95:
            raise ValueError(f"JpegSpec.quality must lie in 1..95, got {self.quality}")


class JpegIncompressibilityRewardScorer(RewardScorer):
    """The size of the image as a JPEG in kB (1000 bytes): rewards detail."""

    reads = ("images",)
    reads_levels = True
    sign = 1.0

    def __init__(self, *, config: JpegSpec = JpegSpec()) -> None:
        self.config = config

    def score(self, request: RewardRequest) -> RewardResponse:
        from PIL import Image

        assert request.images is not None
        sizes = []
        for image in request.images:
            file = io.BytesIO()
            Image.fromarray(uint8_levels(image)).save(file, format="JPEG", quality=self.config.quality)
            sizes.append(file.tell() / 1000)
        return single("jpeg_kb", self.sign * torch.tensor(sizes))


class JpegCompressibilityRewardScorer(JpegIncompressibilityRewardScorer):
    """Minus the size of the image as a JPEG in kB: rewards plain images."""

    sign = -1.0


class BrightnessRewardScorer(RewardScorer):
    """The mean luma of the image in [0, 1] (ITU-R BT.601 weights)."""

    reads = ("images",)
    reads_levels = True
    capabilities = Capabilities(modalities=("image",), differentiable=True)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None
        return single("brightness", self.objective(unit(request.images)))

    def objective(self, images: Tensor, prompts: Sequence[str] = ()) -> Tensor:
        """Returns the differentiable brightness [B] of images [B, 3, H, W]. The prompts have no effect."""
        luma = torch.tensor([0.299, 0.587, 0.114], device=images.device)
        return torch.einsum("bchw,c->bhw", images.float(), luma).mean(dim=(1, 2))
