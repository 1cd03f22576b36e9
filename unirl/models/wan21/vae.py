"""Latents to videos in [0, 1] and back, by Wan's causal VAE: 4 frames a latent frame, the first one by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.models.denoising.vae import from_unit, to_unit


class WanVAE:
    """diffusers' AutoencoderKLWan (fp32) on latents of mean 0 and variance 1 a channel."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, 4 F - 3, H, W] of latents [B, C, F, h, w]."""
        latents = latents * self._of_channels("latents_std", latents) + self._of_channels("latents_mean", latents)
        return to_unit(self.vae.decode(latents, return_dict=False)[0])

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, F, h, w] of pixels [B, 3, 4 F - 3, H, W], or of images [B, 3, H, W], in [0, 1]."""
        return self.latents_of(from_unit(pixels if pixels.dim() == 5 else pixels[:, :, None]))

    def latents_of(self, frames: Tensor) -> Tensor:
        """The Gaussian's mean, of frames in [-1, 1]."""
        mean: Tensor = self.vae.encode(frames.to(self.vae.dtype)).latent_dist.mode()
        return (mean - self._of_channels("latents_mean", mean)) / self._of_channels("latents_std", mean)

    def _of_channels(self, name: str, like: Tensor) -> Tensor:
        """A setting of each channel, to broadcast over [B, C, F, h, w]."""
        values: Tensor = torch.tensor(self.vae.config[name]).to(like)
        return values.view(1, -1, 1, 1, 1)
