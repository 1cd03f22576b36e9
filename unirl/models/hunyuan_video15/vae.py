"""Latents to pixels in [0, 1]."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class HunyuanVideo15Decoder:
    """The VAE's decoder, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # diffusers' AutoencoderKLHunyuanVideo15, which has no types
        self.vae.enable_slicing()  # its attention mask fits a single video

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W] of latents [B, C, F', H', W']."""
        pixels: Tensor = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        return (pixels / 2 + 0.5).clamp(0, 1)
