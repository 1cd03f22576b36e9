"""Latents to pixels in [0, 1]."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class VideoDecoder:
    """The VAE's decoder, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # a video VAE of diffusers that scales its latents and does not shift them

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W] of latents [B, C, F', H', W']."""
        pixels: Tensor = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        return (pixels / 2 + 0.5).clamp(0, 1)
