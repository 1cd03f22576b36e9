"""Latents to pixels in [0, 1] and back: the VAE of FLUX.2, in patches whose channels are normalised.

    pixels --VAE--> [B, 32, H / 8, W / 8] --patches of 2 x 2--> [B, 128, H / 16, W / 16] --(z - mean) / std--> latents

Mean and variance of each of the 128 channels are buffers of the VAE.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.models.denoising.vae import from_unit, to_unit

PATCH = 2


class KleinDecoder:
    """The VAE's decoder, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # diffusers' AutoencoderKLFlux2, which has no types

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of latents [B, 128, H / 16, W / 16]."""
        mean, std = _moments(self.vae)
        return to_unit(self.vae.decode(pixel_shuffle(latents * std + mean, PATCH), return_dict=False)[0])


class KleinEncoder:
    """The VAE's encoder: the mean of its Gaussian."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, 128, H / 16, W / 16] of pixels [B, 3, H, W] in [0, 1]."""
        mean, std = _moments(self.vae)
        latents = pixel_unshuffle(self.vae.encode(from_unit(pixels)).latent_dist.mode(), PATCH)
        return (latents - mean) / std


def _moments(vae: Any) -> tuple[Tensor, Tensor]:
    """[128, 1, 1] mean and standard deviation of each channel of a patch."""
    mean, variance = vae.bn.running_mean, vae.bn.running_var
    return mean[:, None, None], (variance[:, None, None] + vae.config.batch_norm_eps).sqrt()
