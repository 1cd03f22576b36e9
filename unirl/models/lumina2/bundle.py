"""Lumina-Image 2.0 from diffusers classes: a hub id, a directory, or the toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.base import Decoder, Encoder, TextEncoder
from unirl.models.denoising.diffusers_bundle import DiffusersBundle
from unirl.models.denoising.vae import KLDecoder, KLEncoder
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.lumina2.denoiser import Lumina2Denoiser
from unirl.models.lumina2.family import LUMINA2
from unirl.models.lumina2.text import Lumina2TextEncoder


class Lumina2Bundle(DiffusersBundle):
    """Next-DiT, VAE, and Gemma 2."""

    family: ClassVar[DiffusersFamily] = LUMINA2

    def denoiser(self) -> Lumina2Denoiser:
        """The transformer as a velocity field."""
        return Lumina2Denoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """Gemma 2."""
        self.require(("text_encoder",), "encode text")
        places = self.configs.components["transformer"]["axes_lens"][0]
        # The image's tokens stand at the place after the last of the text.
        return Lumina2TextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"], places - 1)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return KLDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode images")
        return KLEncoder(self.modules["vae"])
