"""HunyuanVideo from diffusers classes: a hub id, a directory or the toy."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.denoising.bundle import Decoder, DiffusersBundle, TextEncoder
from unirl.models.hunyuan_video.denoiser import HunyuanVideoDenoiser
from unirl.models.hunyuan_video.family import HUNYUAN_VIDEO
from unirl.models.hunyuan_video.text import HunyuanVideoTextEncoder
from unirl.models.hunyuan_video.vae import VideoDecoder
from unirl.models.loading.checkpoint import DiffusersFamily


class HunyuanVideoBundle(DiffusersBundle):
    """Transformer, VAE, LLaMA and CLIP-L."""

    family: ClassVar[DiffusersFamily] = HUNYUAN_VIDEO

    def denoiser(self) -> HunyuanVideoDenoiser:
        """The transformer as a velocity field."""
        return HunyuanVideoDenoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """LLaMA and CLIP."""
        self.require(HunyuanVideoTextEncoder.components, "encode text")
        return HunyuanVideoTextEncoder(self.modules, self.tokenizers)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return VideoDecoder(self.modules["vae"])
