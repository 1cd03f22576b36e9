"""Stable Diffusion 3 and 3.5 from diffusers classes: a hub id, a directory, the toy, or a shipped small model."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.base import Decoder, Encoder, TextEncoder
from unirl.models.denoising.diffusers_bundle import DiffusersBundle
from unirl.models.denoising.vae import KLDecoder, KLEncoder
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.sd3.denoiser import SD3Denoiser
from unirl.models.sd3.family import ENCODERS, SD3
from unirl.models.sd3.text import SD3TextEncoder
from unirl.models.sd3.vae import PixelDecoder, PixelEncoder


class SD3Bundle(DiffusersBundle):
    """MMDiT, VAE, CLIP-L, CLIP-G and T5; what model_index.json leaves out is absent (no VAE = pixel space)."""

    family: ClassVar[DiffusersFamily] = SD3

    def denoiser(self) -> SD3Denoiser:
        """The transformer as a velocity field."""
        return SD3Denoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """The text encoders that this checkpoint has."""
        self.require([name for name in ENCODERS if name in self.configs], "encode text")
        joint_dim = self.configs.components["transformer"]["joint_attention_dim"]
        return SD3TextEncoder(self.modules, self.tokenizers, joint_dim)

    def decoder(self) -> Decoder:
        """The VAE, or the identity of a model on pixels."""
        if "vae" not in self.configs:
            return PixelDecoder()
        self.require(("vae",), "decode latents")
        return KLDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE, or the identity of a model on pixels."""
        if "vae" not in self.configs:
            return PixelEncoder()
        self.require(("vae",), "encode images")
        return KLEncoder(self.modules["vae"])
