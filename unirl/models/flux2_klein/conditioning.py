"""Images to be edited, as the transformer of FLUX.2-klein reads them beside the sample: their latents."""

from __future__ import annotations

from torch import Tensor

from unirl.models.flux2_klein.vae import KleinEncoder
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.sampling import DiffusionSamplingParams

MAX_CONDITION_IMAGES = 4
"""What the model was made for, as its makers say."""


class KleinImageEncoder:
    """Each image's latents, by the VAE."""

    def __init__(self, encoder: KleinEncoder) -> None:
        self.encoder = encoder
        self.components = encoder.components

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image`: latents [B, N, 128, H / 16, W / 16] of images [B, N, 3, H, W]."""
        latents = self.encoder.encode(images.flatten(0, 1))
        return {"image": LatentCondition(latents=latents.unflatten(0, images.shape[:2]))}
