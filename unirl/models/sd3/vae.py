"""Latents to pixels in [0, 1]: by the VAE, or directly where the model works on pixels."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class SD3Decoder:
    """The VAE's decoder, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # diffusers' AutoencoderKL, which has no types

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents [B, C, H / 8, W / 8]."""
        config = self.vae.config
        latents = latents / config.scaling_factor + config.shift_factor
        return to_unit(self.vae.decode(latents, return_dict=False)[0])


class PixelDecoder:
    """No VAE: a latent is a picture in [-1, 1]."""

    components: tuple[str, ...] = ()

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents of the same shape."""
        return to_unit(latents)


def to_unit(pixels: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], clamped."""
    return (pixels / 2 + 0.5).clamp(0, 1)
