"""Latents to pixels in [0, 1] and back: by the VAE, or directly where the model works on pixels."""

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


class SD3Encoder:
    """The VAE's encoder: the mean of its Gaussian, which is where a picture's latents lie."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]."""
        config = self.vae.config
        mean: Tensor = self.vae.encode(from_unit(pixels)).latent_dist.mode()
        return (mean - config.shift_factor) * config.scaling_factor


class PixelEncoder:
    """No VAE: a latent is a picture in [-1, 1]."""

    components: tuple[str, ...] = ()

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pixels [B, 3, H, W] in [0, 1], of the same shape."""
        return from_unit(pixels)


def from_unit(pixels: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]."""
    return pixels * 2 - 1
