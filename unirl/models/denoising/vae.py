"""Adapters of the VAEs of diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unirl.models.denoising.bundle import Decoder, DiffusersBundle, Encoder
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.device import to_device
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderKLWan
IMAGE = "image"
"""Name of the condition that holds the latents of condition images."""


def to_unit(pixels: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], clamped."""
    return (pixels / 2 + 0.5).clamp(0, 1)


def from_unit(pixels: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]."""
    return pixels * 2 - 1


class VAEAdapter:
    """Base of the adapters of a VAE of diffusers, which computes in its own dtype. Inputs and outputs are fp32."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: nn.Module) -> None:
        self.vae: Any = vae

    def decoded(self, latents: Tensor) -> Tensor:
        """Pixels in [0, 1] of latents that are scaled as the VAE reads them."""
        return to_unit(self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0].float())

    def encoded(self, pixels: Tensor) -> Tensor:
        """The mean of the encoder's Gaussian for pixels in [-1, 1]."""
        mean: Tensor = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist.mode()
        return mean.float()


class KLDecoder(VAEAdapter):
    """The decoder of diffusers' AutoencoderKL."""

    vae: AutoencoderKL

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents [B, C, H / 8, W / 8]."""
        config = self.vae.config
        latents = latents / config.scaling_factor + config.shift_factor
        return self.decoded(latents)


class KLEncoder(VAEAdapter):
    """The encoder of diffusers' AutoencoderKL: the mean of its Gaussian."""

    vae: AutoencoderKL

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]."""
        config = self.vae.config
        return (self.encoded(from_unit(pixels)) - config.shift_factor) * config.scaling_factor


class KLBundle(DiffusersBundle):
    """A bundle whose component `vae` is diffusers' AutoencoderKL."""

    def decoder(self) -> Decoder:
        return KLDecoder(*self.require(("vae",), "decode latents"))

    def encoder(self) -> Encoder:
        return KLEncoder(*self.require(("vae",), "encode images"))


class CausalVAE(VAEAdapter):
    """A causal video VAE of diffusers, with latents of mean 0 and variance 1 per channel.

    A latent frame covers 4 frames, and the first latent frame covers the first frame alone.
    """

    vae: AutoencoderKLWan

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, 4 F - 3, H, W] in [0, 1] of latents [B, C, F, h, w]."""
        mean, std = self._channel_statistics(latents)
        return self.decoded(latents * std + mean)

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, F, h, w] of pixels [B, 3, 4 F - 3, H, W], or of images [B, 3, H, W], in [0, 1]."""
        return self.encode_frames(from_unit(pixels if pixels.dim() == 5 else pixels[:, :, None]))

    def encode_frames(self, frames: Tensor) -> Tensor:
        """Latents [B, C, F, h, w] of frames [B, 3, 4 F - 3, H, W] in [-1, 1]: the mean of the encoder's Gaussian."""
        latents = self.encoded(frames)
        mean, std = self._channel_statistics(latents)
        return (latents - mean) / std

    def _channel_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, which broadcast over [B, C, F, h, w]."""
        names = ("latents_mean", "latents_std")
        mean, std = (to_device(torch.tensor(self.vae.config[name], dtype=like.dtype), like.device) for name in names)
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


class ReferenceEncoder:
    """Condition images as VAE latents, at the size of the sample."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.components = encoder.components

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image`: latents [B, N, C, h, w] of images [B, N, 3, H, W] in [0, 1]."""
        latents = self.encoder.encode(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        return {IMAGE: LatentCondition(latents=latents)}
