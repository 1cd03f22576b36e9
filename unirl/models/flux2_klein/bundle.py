"""FLUX.2-klein from diffusers classes: a hub id, a directory, or a toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.denoising.bundle import ConditionImageEncoder, Decoder, DiffusersBundle, Encoder, TextEncoder
from unirl.models.flux2_klein.conditioning import KleinImageEncoder
from unirl.models.flux2_klein.denoiser import KleinDenoiser
from unirl.models.flux2_klein.family import FLUX2_KLEIN
from unirl.models.flux2_klein.text import KleinTextEncoder
from unirl.models.flux2_klein.vae import KleinDecoder, KleinEncoder
from unirl.models.loading.checkpoint import DiffusersFamily


class Flux2KleinBundle(DiffusersBundle):
    """Transformer, Qwen3 and VAE."""

    family: ClassVar[DiffusersFamily] = FLUX2_KLEIN

    def denoiser(self) -> KleinDenoiser:
        """The transformer as a velocity field."""
        return KleinDenoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """Qwen3."""
        self.require(KleinTextEncoder.components, "encode text")
        return KleinTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"])

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """The VAE: images to be edited."""
        self.require(("vae",), "encode images")
        return KleinImageEncoder(KleinEncoder(self.modules["vae"]))

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return KleinDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode images")
        return KleinEncoder(self.modules["vae"])
