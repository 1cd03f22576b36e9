"""Latents to pixels in [0, 1] and back: the VAE of Qwen-Image, which is one of videos, on one frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.models.vae import from_unit, to_unit


class QwenImageVAE:
    """What decoder and encoder share: the VAE in its own dtype (fp32), and how its channels are normalised."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # diffusers' AutoencoderKLQwenImage, which has no types

    def channels(self, name: str) -> Tensor:
        """[C, 1, 1] of the configuration's `latents_mean` or `latents_std`."""
        return torch.tensor(self.vae.config[name], device=self.vae.device)[:, None, None]


class QwenImageDecoder(QwenImageVAE):
    """The VAE's decoder."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents [B, C, H / 8, W / 8]."""
        latents = latents * self.channels("latents_std") + self.channels("latents_mean")
        return to_unit(self.vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0])


class QwenImageEncoder(QwenImageVAE):
    """The VAE's encoder: the mean of its Gaussian."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]."""
        mean = self.vae.encode(from_unit(pixels)[:, :, None]).latent_dist.mode()[:, :, 0]
        return (mean - self.channels("latents_mean")) / self.channels("latents_std")
