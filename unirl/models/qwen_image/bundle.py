"""Qwen-Image from diffusers classes: a hub id, a directory, or a toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.denoising.bundle import Decoder, DiffusersBundle, Encoder, TextEncoder
from unirl.models.denoising.stage import Denoiser
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.qwen_image.denoiser import QwenImageDenoiser
from unirl.models.qwen_image.family import QWEN_IMAGE
from unirl.models.qwen_image.templates import DRAW
from unirl.models.qwen_image.text import QwenImageTextEncoder
from unirl.models.qwen_image.vae import QwenImageVAE


class QwenImageBundle(DiffusersBundle):
    """MMDiT, Qwen2.5-VL and VAE."""

    family: ClassVar[DiffusersFamily] = QWEN_IMAGE

    def denoiser(self) -> Denoiser:
        """The transformer as a velocity field."""
        return QwenImageDenoiser(self.trainable(), self.facts.patch_size)

    def text_encoder(self) -> TextEncoder:
        """Qwen2.5-VL, which reads."""
        self.require(("text_encoder",), "encode text")
        return QwenImageTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"], DRAW)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return QwenImageVAE(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode images")
        return QwenImageVAE(self.modules["vae"])
