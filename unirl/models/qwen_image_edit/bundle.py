"""Qwen-Image-Edit from diffusers classes: a hub id, a directory, or a toy."""

from __future__ import annotations

from typing import Any, ClassVar

from unirl.models.denoising.bundle import ConditionImageEncoder, TextEncoder
from unirl.models.denoising.stage import Denoiser
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.qwen_image.bundle import QwenImageBundle
from unirl.models.qwen_image_edit.conditioning import ReferenceEncoder
from unirl.models.qwen_image_edit.denoiser import QwenImageEditDenoiser
from unirl.models.qwen_image_edit.family import PROCESSOR, QWEN_IMAGE_EDIT
from unirl.models.qwen_image_edit.templates import TEMPLATES
from unirl.models.qwen_image_edit.text import QwenImageEditTextEncoder
from unirl.models.qwen_vl.sight import image_text_processor


class QwenImageEditBundle(QwenImageBundle):
    """The networks of Qwen-Image; images are fed to all three."""

    family: ClassVar[DiffusersFamily] = QWEN_IMAGE_EDIT

    def denoiser(self) -> Denoiser:
        """The transformer as a velocity field."""
        return QwenImageEditDenoiser(self.trainable(), self.facts.patch_size)

    def text_encoder(self) -> TextEncoder:
        """Qwen2.5-VL, which sees the images."""
        self.require(("text_encoder",), "encode text")
        return QwenImageEditTextEncoder(
            self.modules["text_encoder"],
            self.tokenizers["tokenizer"],
            TEMPLATES[self.configs.pipeline],
            self.tokenizers[PROCESSOR].image_processor,
        )

    def condition_image_encoder(self) -> ConditionImageEncoder:
        """The VAE."""
        return ReferenceEncoder(self.encoder())

    def _load_tokenizers(self) -> dict[str, Any]:
        """The tokenizer, and the processor: transformers' own way to read it needs torchvision."""
        if self.family.is_toy(self.path):
            return super()._load_tokenizers()
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        root = self.family.directory(self.path, self.revision)
        tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(root / PROCESSOR, local_files_only=True)
        return {"tokenizer": tokenizer, PROCESSOR: image_text_processor(image_processor, tokenizer)}
