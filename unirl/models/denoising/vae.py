"""Latents to pixels in [0, 1] and back, by the VAE that several families of images share."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
    """The encoder of diffusers' AutoencoderKL: the mean of its Gaussian, which is where an image's latents lie."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]."""
        config = self.vae.config
        mean: Tensor = self.vae.encode(from_unit(pixels)).latent_dist.mode()
        return (mean - config.shift_factor) * config.scaling_factor


def kl_config(scaling_factor: float, shift_factor: float) -> dict[str, Any]:
    """The configuration of the public AutoencoderKLs of 16 channels, which differ in the scale of their latents."""
    return _kl_config(1024, 16, (128, 256, 512, 512), 2, 32) | {
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
    }


def toy_kl_config(scaling_factor: float, shift_factor: float) -> dict[str, Any]:
    """The same, tiny: 4 channels."""
    return _kl_config(32, 4, (8, 8, 16, 16), 1, 4) | {"scaling_factor": scaling_factor, "shift_factor": shift_factor}


def _kl_config(
    sample_size: int, latent_channels: int, widths: tuple[int, ...], layers_per_block: int, norm_num_groups: int
) -> dict[str, Any]:
    return {
        "sample_size": sample_size,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": latent_channels,
        "block_out_channels": widths,
        "layers_per_block": layers_per_block,
        "norm_num_groups": norm_num_groups,
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def to_unit(pixels: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], clamped."""
    return (pixels / 2 + 0.5).clamp(0, 1)


def from_unit(pixels: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]."""
    return pixels * 2 - 1
