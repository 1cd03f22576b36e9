"""Latents to pixels and back where the model works on pixels; a model with a VAE has the shared one."""

from __future__ import annotations

from torch import Tensor

from unirl.models.denoising.vae import from_unit, to_unit


class PixelDecoder:
    """No VAE: a latent is an image in [-1, 1]."""

    components: tuple[str, ...] = ()

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents of the same shape."""
        return to_unit(latents)


class PixelEncoder:
    """No VAE: a latent is an image in [-1, 1]."""

    components: tuple[str, ...] = ()

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pixels [B, 3, H, W] in [0, 1], of the same shape."""
        return from_unit(pixels)
