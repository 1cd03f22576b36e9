"""A first frame to what the 5B model reads of it: the frame's own latents [B, C, 1, h, w]."""

from __future__ import annotations

from torch import Tensor

from unirl.models.wan21.denoiser import FIRST_FRAME
from unirl.models.wan21.vae import WanVAE
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.sampling import DiffusionSamplingParams


class FirstLatentEncoder:
    """By the VAE. The same tensor as `WanImageToVideoPipeline`'s with `expand_timesteps`."""

    def __init__(self, vae: WanVAE) -> None:
        self.vae = vae
        self.components = vae.components

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """The condition of images [B, 1, 3, H, W] in [0, 1]."""
        return {FIRST_FRAME: LatentCondition(latents=self.vae.encode(images[:, 0]))}
