"""Wan 2.1 from diffusers classes: a hub id, a directory, or a toy; text to video, or image to video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from unirl.models.denoising.bundle import ConditionImageEncoder, Decoder, DiffusersBundle, Encoder, TextEncoder
from unirl.models.denoising.stage import Denoiser
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.wan21.conditioning import FirstFrameEncoder
from unirl.models.wan21.denoiser import WanDenoiser
from unirl.models.wan21.family import WAN21
from unirl.models.wan21.text import WanTextEncoder
from unirl.models.wan21.vae import WanVAE

CLIP, CLIP_PROCESSOR = "image_encoder", "image_processor"
TEXT_LENGTH_BESIDE_CLIP = 512
"""By which diffusers' WanTransformer3DModel tells tokens of text from those of CLIP before them."""


class WanBundle(DiffusersBundle):
    """What Wan 2.1 and 2.2 share: a transformer, UMT5, the VAE, and CLIP-vision where the checkpoint has one."""

    def denoiser(self) -> Denoiser:
        """The transformer as a velocity field."""
        return WanDenoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """UMT5."""
        self.require(("text_encoder",), "encode text")
        fixed_length = TEXT_LENGTH_BESIDE_CLIP if CLIP in self.configs else None
        return WanTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"], fixed_length)

    def vae(self) -> WanVAE:
        """Both ways through the VAE."""
        self.require(("vae",), "encode or decode videos")
        return WanVAE(self.modules["vae"])

    def decoder(self) -> Decoder:
        """The VAE."""
        return self.vae()

    def encoder(self) -> Encoder:
        """The VAE; an image is a video of one frame."""
        return self.vae()

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """Of a first frame, in checkpoints of image to video."""
        if not self.facts.condition_images[1]:
            return None
        return self.first_frame_encoder()

    def first_frame_encoder(self) -> ConditionImageEncoder:
        """By the VAE, and by CLIP-vision if the checkpoint has it."""
        assert self.facts.frame_scale is not None
        if CLIP not in self.configs:
            return FirstFrameEncoder(self.vae(), self.facts.frame_scale)
        self.require((CLIP,), "encode condition images")
        return FirstFrameEncoder(
            self.vae(), self.facts.frame_scale, self.modules[CLIP], self.tokenizers[CLIP_PROCESSOR]
        )

    def _load_tokenizers(self) -> dict[str, Any]:
        found = super()._load_tokenizers()
        return found if CLIP in self.configs else {n: t for n, t in found.items() if n != CLIP_PROCESSOR}


class Wan21Bundle(WanBundle):
    """Wan 2.1."""

    family: ClassVar[DiffusersFamily] = WAN21


class Wan21ImageBundle(Wan21Bundle):
    """The same, whose toy is one of image to video."""

    toy: ClassVar[Mapping[str, object]] = {**Wan21Bundle.toy, "path": "toy-i2v"}
