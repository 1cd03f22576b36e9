"""The VAE of HunyuanImage-3: 32 channels at a sixteenth of the size, from convolutions over frames, rows and columns.

It was made for videos, and 4 frames share a latent frame. An image is a video of 4 equal frames, and the last frame of
what a latent frame decodes to. Parameters have the names of the published checkpoint, without the prefix `vae.`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from unirl.models.denoising.vae import VAEAdapter, from_unit

NORM_GROUPS, NORM_EPS = 32, 1e-6
Factors = tuple[int, int, int]
"""Factors of frames, rows and columns."""


def to_channels(x: Tensor, factors: Factors) -> Tensor:
    """[B, f h w C, F / f, H / h, W / w] from [B, C, F, H, W]. Channels are ordered by place, then by channel."""
    f, h, w = factors
    batch, channels, frames, rows, columns = x.shape
    cells = x.view(batch, channels, frames // f, f, rows // h, h, columns // w, w)
    return cells.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(batch, -1, frames // f, rows // h, columns // w)


def from_channels(x: Tensor, factors: Factors) -> Tensor:
    """The inverse of `to_channels`."""
    f, h, w = factors
    batch, _, frames, rows, columns = x.shape
    cells = x.view(batch, f, h, w, -1, frames, rows, columns)
    return cells.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(batch, -1, frames * f, rows * h, columns * w)


def norm_of(channels: int) -> nn.GroupNorm:
    """The norm of all blocks."""
    return nn.GroupNorm(NORM_GROUPS, channels, eps=NORM_EPS)


def convolution(inputs: int, outputs: int) -> nn.Conv3d:
    """A convolution over 3 x 3 x 3 places."""
    return nn.Conv3d(inputs, outputs, 3, padding=1)


class ResnetBlock(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm_of(channels), convolution(channels, channels)
        self.norm2, self.conv2 = norm_of(channels), convolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] from [B, C, F, H, W]."""
        h = self.conv1(silu(self.norm1(x)))
        result: Tensor = x + self.conv2(silu(self.norm2(h)))
        return result


class AttnBlock(nn.Module):
    """Attention among all places, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm_of(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv3d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] from [B, C, F, H, W]."""
        h = self.norm(x)
        tokens = (layer(h).flatten(2).transpose(1, 2)[:, None] for layer in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(*tokens)[:, 0].transpose(1, 2).reshape(x.shape)
        result: Tensor = x + self.proj_out(attended)
        return result


class Downsample(nn.Module):
    """Places to channels, with a shortcut that averages channels."""

    def __init__(self, inputs: int, outputs: int, factors: Factors) -> None:
        super().__init__()
        self.factors = factors
        self.conv = convolution(inputs, outputs // math.prod(factors))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C', F / f, H / h, W / w] from [B, C, F, H, W]."""
        h = to_channels(self.conv(x), self.factors)
        return h + to_channels(x, self.factors).unflatten(1, (h.shape[1], -1)).mean(2)


class Upsample(nn.Module):
    """Channels to places, with a shortcut that repeats channels."""

    def __init__(self, inputs: int, outputs: int, factors: Factors) -> None:
        super().__init__()
        self.factors = factors
        self.repeats = math.prod(factors) * outputs // inputs
        self.conv = convolution(inputs, outputs * math.prod(factors))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C', F f, H h, W w] from [B, C, F, H, W]."""
        h = from_channels(self.conv(x), self.factors)
        return h + from_channels(x.repeat_interleave(self.repeats, dim=1), self.factors)


class Level(nn.Module):
    """The residual blocks of one size, and the way to the next size."""

    def __init__(self, blocks: Sequence[nn.Module], name: str, resample: nn.Module | None) -> None:
        super().__init__()
        self.block = nn.ModuleList(blocks)
        self.name = name
        if resample is not None:
            self.add_module(name, resample)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C', F', H', W'] from [B, C, F, H, W]."""
        for block in self.block:
            x = block(x)
        return self.get_submodule(self.name)(x) if self.name in self._modules else x


class Middle(nn.Module):
    """The blocks at the smallest size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.block_2 = (ResnetBlock(channels) for _ in range(2))
        self.attn_1 = AttnBlock(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] from [B, C, F, H, W]."""
        result: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return result


def levels(widths: Sequence[int], layers: int, name: str, factors: Sequence[Factors]) -> nn.ModuleList:
    """The levels of an encoder or a decoder, each as wide as its entry of `widths`. All but the last resample."""
    kind, result = (Downsample if name == "downsample" else Upsample), nn.ModuleList()
    for i, width in enumerate(widths):
        resample = kind(width, widths[i + 1], factors[i]) if i < len(factors) else None
        result.append(Level([ResnetBlock(width) for _ in range(layers)], name, resample))
    return result


class ImageVAEEncoder(nn.Module):
    """Pixels to means and log-variances of latents."""

    def __init__(self, config: Mapping[str, Any], factors: Sequence[Factors]) -> None:
        super().__init__()
        widths = config["block_out_channels"]
        self.conv_in = convolution(config["in_channels"], widths[0])
        self.down = levels(widths, config["layers_per_block"], "downsample", factors)
        self.mid = Middle(widths[-1])
        self.norm_out = norm_of(widths[-1])
        self.conv_out = convolution(widths[-1], 2 * config["latent_channels"])

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2 C, F, h, w] from pixels [B, 3, F', H, W]."""
        h = self.conv_in(x)
        for level in self.down:
            h = level(h)
        h = self.mid(h)
        out = self.conv_out(silu(self.norm_out(h)))
        result: Tensor = out + h.unflatten(1, (out.shape[1], -1)).mean(2)
        return result


class ImageVAEDecoder(nn.Module):
    """Latents to pixels."""

    def __init__(self, config: Mapping[str, Any], factors: Sequence[Factors]) -> None:
        super().__init__()
        widths, channels = config["block_out_channels"][::-1], config["latent_channels"]
        self.repeats = widths[0] // channels
        self.conv_in = convolution(channels, widths[0])
        self.mid = Middle(widths[0])
        self.up = levels(widths, config["layers_per_block"] + 1, "upsample", factors)
        self.norm_out = norm_of(widths[-1])
        self.conv_out = convolution(widths[-1], config["out_channels"])

    def forward(self, z: Tensor) -> Tensor:
        """Pixels [B, 3, F', H, W] from latents [B, C, F, h, w]."""
        h = self.mid(self.conv_in(z) + z.repeat_interleave(self.repeats, dim=1))
        for level in self.up:
            h = level(h)
        result: Tensor = self.conv_out(silu(self.norm_out(h)))
        return result


class HunyuanImage3VAE(nn.Module):
    """The encoder and the decoder of images."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        spatial, temporal = (int(math.log2(config[f"ffactor_{axis}"])) for axis in ("spatial", "temporal"))
        # The frames are joined last, and are separated first.
        up = [(2, 2, 2) if i < temporal else (1, 2, 2) for i in range(spatial)]
        self.encoder, self.decoder = ImageVAEEncoder(config, up[::-1]), ImageVAEDecoder(config, up)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A VAE with newly initialised weights. Keys that it does not know are ignored."""
        return cls(config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.decoder.conv_in.weight.dtype

    def decode(self, z: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Pixels [B, 3, 1, H, W] of latents [B, C, 1, h, w]."""
        return (self.decoder(z)[:, :, -1:],)

    def encode(self, pixels: Tensor) -> Tensor:
        """Means [B, C, 1, h, w] of latents from pixels [B, 3, 1, H, W]."""
        frames = pixels.expand(-1, -1, self.config["ffactor_temporal"], -1, -1)
        mean: Tensor = self.encoder(frames).chunk(2, dim=1)[0]
        return mean


class ImageVAE(VAEAdapter):
    """The VAE as encoder and decoder of images."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents [B, C, h, w]."""
        return self.decoded(latents[:, :, None] / self.vae.config["scaling_factor"])[:, :, 0]

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, h, w] of pixels [B, 3, H, W] in [0, 1]: the mean of the encoder's Gaussian."""
        mean: Tensor = self.vae.encode(from_unit(pixels)[:, :, None].to(self.vae.dtype))
        return mean[:, :, 0].float() * self.vae.config["scaling_factor"]
