"""HunyuanVideo 1.5 from diffusers classes: a hub id, a directory or the toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.denoising.bundle import Decoder, DiffusersBundle, TextEncoder
from unirl.models.hunyuan_video15.denoiser import HunyuanVideo15Denoiser
from unirl.models.hunyuan_video15.family import HUNYUAN_VIDEO_15
from unirl.models.hunyuan_video15.text import HunyuanVideo15TextEncoder
from unirl.models.hunyuan_video15.vae import HunyuanVideo15Decoder
from unirl.models.loading.checkpoint import DiffusersFamily


class HunyuanVideo15Bundle(DiffusersBundle):
    """Transformer, VAE, Qwen2.5-VL's language model and ByT5."""

    family: ClassVar[DiffusersFamily] = HUNYUAN_VIDEO_15

    def denoiser(self) -> HunyuanVideo15Denoiser:
        """The transformer as a velocity field."""
        return HunyuanVideo15Denoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """Qwen2.5-VL and ByT5."""
        self.require(HunyuanVideo15TextEncoder.components, "encode text")
        return HunyuanVideo15TextEncoder(self.modules, self.tokenizers)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return HunyuanVideo15Decoder(self.modules["vae"])
