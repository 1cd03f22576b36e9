"""Z-Image from diffusers classes: a hub id, a directory or the toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.base import Decoder, Encoder, TextEncoder
from unirl.models.denoising.diffusers_bundle import DiffusersBundle
from unirl.models.denoising.vae import KLDecoder, KLEncoder
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.z_image.denoiser import ZImageDenoiser
from unirl.models.z_image.family import Z_IMAGE
from unirl.models.z_image.text import ZImageTextEncoder


class ZImageBundle(DiffusersBundle):
    """Transformer, Qwen3 and VAE."""

    family: ClassVar[DiffusersFamily] = Z_IMAGE

    def denoiser(self) -> ZImageDenoiser:
        """The transformer as a velocity field."""
        return ZImageDenoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """Qwen3."""
        self.require(ZImageTextEncoder.components, "encode text")
        return ZImageTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"])

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return KLDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode images")
        return KLEncoder(self.modules["vae"])
