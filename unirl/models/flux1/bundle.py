"""FLUX.1 from diffusers classes: a hub id, a directory, or a toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.base import Decoder, Encoder, TextEncoder
from unirl.models.denoising.diffusers_bundle import DiffusersBundle
from unirl.models.denoising.vae import KLDecoder, KLEncoder
from unirl.models.flux1.denoiser import Flux1Denoiser
from unirl.models.flux1.family import FLUX1
from unirl.models.flux1.text import Flux1TextEncoder
from unirl.models.loading.checkpoint import DiffusersFamily


class Flux1Bundle(DiffusersBundle):
    """Transformer, CLIP-L, T5 and VAE."""

    family: ClassVar[DiffusersFamily] = FLUX1

    def denoiser(self) -> Flux1Denoiser:
        """The transformer as a velocity field."""
        return Flux1Denoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """CLIP-L and T5."""
        self.require(Flux1TextEncoder.components, "encode text")
        return Flux1TextEncoder(self.modules, self.tokenizers)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return KLDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode images")
        return KLEncoder(self.modules["vae"])
