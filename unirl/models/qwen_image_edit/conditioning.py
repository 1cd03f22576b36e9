"""Images to be edited, as the transformer reads them: latents beside the sample's."""

from __future__ import annotations

from torch import Tensor

from unirl.models.denoising.bundle import Encoder
from unirl.models.qwen_image_edit.denoiser import IMAGE
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.sampling import DiffusionSamplingParams


class ReferenceEncoder:
    """The VAE's latents of every image, at the size that is drawn.

    diffusers brings references to 1024 x 1024 pixels in area at their own aspect ratio, whatever it draws; at that size
    both are the same. Below it, references shrink with the sample, so that a token costs what it costs in the sample.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.components = encoder.components

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image`: latents [B, N, C, H / 8, W / 8] of images [B, N, 3, H, W] in [0, 1]."""
        latents = self.encoder.encode(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        return {IMAGE: LatentCondition(latents=latents)}
