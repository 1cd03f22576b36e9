"""Qwen-Image and Qwen-Image-Edit from diffusers classes: a hub id, a directory, or a toy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from unirl.models.base import Decoder, Encoder, PictureEncoder, TextEncoder
from unirl.models.checkpoint import DiffusersFamily
from unirl.models.diffusers_bundle import DiffusersBundle
from unirl.models.qwen_image.conditioning import ReferenceEncoder
from unirl.models.qwen_image.denoiser import QwenImageDenoiser
from unirl.models.qwen_image.family import QWEN_IMAGE
from unirl.models.qwen_image.templates import TEMPLATES
from unirl.models.qwen_image.text import QwenImageEditTextEncoder, QwenImageTextEncoder
from unirl.models.qwen_image.vae import QwenImageVAE
from unirl.models.qwen_vl.sight import picture_processor
from unirl.models.qwen_vl.toy import toy_image_processor

PROCESSOR = "processor"


class QwenImageBundle(DiffusersBundle):
    """MMDiT, Qwen2.5-VL and VAE. A checkpoint that edits feeds pictures to all three."""

    family: ClassVar[DiffusersFamily] = QWEN_IMAGE

    def denoiser(self) -> QwenImageDenoiser:
        """The transformer as a velocity field."""
        return QwenImageDenoiser(self.trainable(), self.facts.patch_size)

    def text_encoder(self) -> TextEncoder:
        """Qwen2.5-VL, which sees the pictures of a checkpoint that edits."""
        self.require(("text_encoder",), "encode text")
        parts = self.modules["text_encoder"], self.tokenizers["tokenizer"], TEMPLATES[self.checkpoint.pipeline]
        if not self._edits:
            return QwenImageTextEncoder(*parts)
        return QwenImageEditTextEncoder(*parts, self.tokenizers[PROCESSOR].image_processor)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return QwenImageVAE(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode pictures")
        return QwenImageVAE(self.modules["vae"])

    def picture_encoder(self) -> PictureEncoder | None:
        """The VAE, of a checkpoint that edits."""
        return ReferenceEncoder(self.encoder()) if self._edits else None

    @property
    def _edits(self) -> bool:
        return self.checkpoint.pipeline in self.family.further_pipelines

    def _load_tokenizers(self) -> dict[str, Any]:
        """The tokenizer, and the processor of a checkpoint that edits."""
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        if self.family.is_toy(self.path):
            loaded, image_processor = dict(self.family.toy_tokenizers()), toy_image_processor
        else:
            root = self.family.directory(self.path, self.revision)
            loaded = {"tokenizer": AutoTokenizer.from_pretrained(root / "tokenizer")}

            def image_processor() -> Any:
                return Qwen2VLImageProcessorPil.from_pretrained(root / PROCESSOR, local_files_only=True)

        if self._edits:
            loaded[PROCESSOR] = picture_processor(image_processor(), loaded["tokenizer"])
        return loaded


class QwenImageEditBundle(QwenImageBundle):
    """The same, whose toy is one that edits."""

    toy: ClassVar[Mapping[str, object]] = {**QwenImageBundle.toy, "path": "toy-edit"}
