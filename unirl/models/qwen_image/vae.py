"""Latents to pixels in [0, 1] and back: the VAE of Qwen-Image, which is one of videos, on one frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.models.denoising.vae import from_unit, to_unit


class QwenImageVAE:
    """diffusers' AutoencoderKLQwenImage in its own dtype (fp32), and how its channels are normalised."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents [B, C, H / 8, W / 8]."""
        latents = latents * self._of_channels("latents_std") + self._of_channels("latents_mean")
        return to_unit(self.vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0])

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]: the mean of the encoder's Gaussian."""
        mean = self.vae.encode(from_unit(pixels)[:, :, None]).latent_dist.mode()[:, :, 0]
        return (mean - self._of_channels("latents_mean")) / self._of_channels("latents_std")

    def _of_channels(self, name: str) -> Tensor:
        """A setting of each channel, [C, 1, 1]."""
        return torch.tensor(self.vae.config[name], device=self.vae.device)[:, None, None]
