"""Encoder and decoder of the VAE that several image families share (diffusers' AutoencoderKL)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.models.denoising.bundle import Decoder, DiffusersBundle, Encoder


class KLDecoder:
    """The decoder of diffusers' AutoencoderKL, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # diffusers' AutoencoderKL, which has no types

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents [B, C, H / 8, W / 8]."""
        config = self.vae.config
        latents = latents / config.scaling_factor + config.shift_factor
        return to_unit(self.vae.decode(latents, return_dict=False)[0])


class KLEncoder:
    """The encoder of diffusers' AutoencoderKL: the mean of its Gaussian."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]."""
        config = self.vae.config
        mean: Tensor = self.vae.encode(from_unit(pixels)).latent_dist.mode()
        return (mean - config.shift_factor) * config.scaling_factor


def to_unit(pixels: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], clamped."""
    return (pixels / 2 + 0.5).clamp(0, 1)


def from_unit(pixels: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]."""
    return pixels * 2 - 1


class KLBundle(DiffusersBundle):
    """A bundle whose component `vae` is diffusers' AutoencoderKL."""

    def decoder(self) -> Decoder:
        """The decoder of the VAE."""
        self.require(("vae",), "decode latents")
        return KLDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The encoder of the VAE."""
        self.require(("vae",), "encode images")
        return KLEncoder(self.modules["vae"])
