"""Qwen-Image-Edit: the networks of Qwen-Image, which also read images to be edited or combined.

Qwen2.5-VL reads the images in the chat, before the prompt:

    chat    [opening | images | prompt | closing | padding]  --Qwen2.5-VL-->  [B, num_dropped + P + L, D]
    tokens  [B, P + L, D] without the opening, zero at padding;  P = tokens of the images and of the text around them

These tensors equal those of diffusers' `encode_prompt`, except that all prompts have the same length: diffusers never
truncates a prompt, and here `max_sequence_length` does.

The transformer reads the VAE latents of each image as tokens after those of the sample. The images have the size of the
sample. diffusers resizes them to an area of 1024 x 1024 pixels at their own aspect ratio, whatever the size of the
sample; for a sample of that size both are the same.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from unittest.mock import patch

from torch import Tensor, nn

from unirl.models.denoising.bundle import ConditionImageEncoder, NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import PlainPipeline
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.vae import IMAGE, ReferenceEncoder
from unirl.models.images import to_pil
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, family_files
from unirl.models.qwen_image import family as qwen_image
from unirl.models.qwen_vl.vision import image_text_processor, toy_image_processor
from unirl.types.conditions import Conditions, LatentCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

PROCESSOR = "processor"
MAX_CONDITION_IMAGES = {"": 1, qwen_image.EDIT_PLUS_PIPELINE: 3}
"""Most condition images, by the pipeline that a checkpoint names. At least one is required."""
REFERENCE_PIXELS = 1024 * 1024
"""diffusers resizes the images for the VAE to this area."""
SIDE_MULTIPLE = 32


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint: those of Qwen-Image, and the number of condition images."""
    return replace(
        qwen_image.facts(configs, batch_multiple),
        family="qwen_image_edit",
        condition_images=(1, MAX_CONDITION_IMAGES[configs.pipeline]),
        reference_tokens=True,
    )


# The chat around a prompt

IMAGE_PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"


@dataclass(frozen=True)
class EditTemplate(qwen_image.Template):
    """A chat with images before the prompt."""

    image: str
    """The text of one image; {} is replaced by its number."""
    encoder_pixels: int | None = None
    """The area to which images are resized for Qwen2.5-VL. None: they are not resized."""


OPENING = qwen_image.chat_opening(
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
TEMPLATES: Mapping[str, EditTemplate] = {
    "": EditTemplate(OPENING, 64, VISION),
    qwen_image.EDIT_PLUS_PIPELINE: EditTemplate(OPENING, 64, f"Picture {{}}: {VISION}", 384 * 384),
}
"""Template by the pipeline that a checkpoint names."""


def toy_tokenizers() -> Mapping[str, PreTrainedTokenizerBase]:
    """The tokenizer of Qwen2.5-VL, and the processor of images and texts."""
    tokenizer = qwen_image.toy_tokenizer(OPENING)
    return {"tokenizer": tokenizer, PROCESSOR: image_text_processor(toy_image_processor(), tokenizer)}


QWEN_IMAGE_EDIT = DiffusersFamily(
    name="qwen_image_edit",
    vae_in_bf16=True,
    pipeline=qwen_image.EDIT_PIPELINE,
    further_pipelines=(qwen_image.EDIT_PLUS_PIPELINE,),
    foreign_pipelines={
        qwen_image.PIPELINE: "unirl.models.qwen_image.family.QwenImageBundle and "
        "unirl.models.qwen_image.family.QwenImagePipeline"
    },
    classes=qwen_image.COMPONENT_CLASSES,
    tokenizers=("tokenizer", PROCESSOR),
    facts=facts,
    toy_tokenizers=toy_tokenizers,
    seed=qwen_image.TOY_SEED,
    **family_files(__file__),
)


class QwenImageEditDenoiser(qwen_image.QwenImageDenoiser):
    """The transformer as a velocity field. The tokens of condition images follow the sample's."""

    def references(self, conditions: Conditions) -> Sequence[Tensor]:
        """Latents [B, C, H, W] of each image in the condition `image`."""
        image = conditions.get(IMAGE)
        if image is None:
            return ()
        assert isinstance(image, LatentCondition)
        return image.latents.unbind(1)


@dataclass(frozen=True)
class QwenImageEditTextEncoder(qwen_image.QwenImageTextEncoder):
    """The frozen Qwen2.5-VL, which reads text and images."""

    template: EditTemplate
    image_processor: Qwen2VLImageProcessorPil

    def encode_with_images(self, texts: Sequence[str], max_sequence_length: int, images: Tensor) -> TextEmbedCondition:
        """The condition of `texts`, each with its images [B, N, 3, H, W] in [0, 1]."""
        patches = self.image_processor(images=[self._resized(i) for i in images.flatten(0, 1)], return_tensors="pt")
        counts = patches["image_grid_thw"].prod(1) // self.image_processor.merge_size**2
        num_images = images.shape[1]
        texts_around = "".join(self.template.image.format(i + 1) for i in range(num_images)).split(IMAGE_PAD)
        # All images of a call have one size, and so the same number of tokens.
        placeholders = [IMAGE_PAD * count for count in counts[:num_images].tolist()]
        image_text = "".join(part for pair in zip(texts_around, [*placeholders, ""], strict=True) for part in pair)
        tokens = self._tokens(texts, self.template.opening + image_text, max_sequence_length)
        vision = {name: patches[name] for name in ("pixel_values", "image_grid_thw")}
        vision["mm_token_type_ids"] = self._image_mask(tokens["input_ids"], image_text.count(IMAGE_PAD))
        return self._states({**tokens, **vision})

    def _image_mask(self, ids: Tensor, count: int) -> Tensor:
        """[B, L] 1 at image tokens. Raises ValueError if a prompt contains the text of one."""
        mask = ids == self.tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        if bool((mask.sum(1) != count).any()):
            raise ValueError(
                f"a prompt contains {IMAGE_PAD}, which is the model's own image token. Remove it from the data"
            )
        return mask.int()

    def _resized(self, pixels: Tensor) -> Image:
        """The image [3, H, W] for the image processor, resized to the area that the template requires."""
        image = to_pil(pixels)
        if self.template.encoder_pixels is None:
            return image
        from PIL.Image import Resampling

        size = size_of_area(self.template.encoder_pixels, image.width / image.height)
        return image.resize(size, Resampling.LANCZOS)


def size_of_area(pixels: int, ratio: float) -> tuple[int, int]:
    """(width, height) of about `pixels` in area with width / height = ratio, in multiples of 32."""
    exact_width = math.sqrt(pixels * ratio)
    width, height = (round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE for side in (exact_width, exact_width / ratio))
    return width, height


class QwenImageEditBundle(qwen_image.QwenImageBundle):
    """Transformer, Qwen2.5-VL and VAE, all of which read the condition images."""

    family: ClassVar[DiffusersFamily] = QWEN_IMAGE_EDIT
    denoiser_class: ClassVar[type[NetworkDenoiser]] = QwenImageEditDenoiser

    def text_encoder(self) -> TextEncoder:
        [encoder] = self.require(("text_encoder",), "encode text")
        tokenizer, image_processor = self.tokenizers["tokenizer"], self.tokenizers[PROCESSOR].image_processor
        return QwenImageEditTextEncoder(encoder, tokenizer, TEMPLATES[self.configs.pipeline], image_processor)

    def condition_image_encoder(self) -> ConditionImageEncoder:
        return ReferenceEncoder(self.encoder())

    def _load_tokenizers(self) -> dict[str, PreTrainedTokenizerBase]:
        """The tokenizer and the processor. transformers' own way to load the processor needs torchvision."""
        if self.root is None:
            return super()._load_tokenizers()
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        tokenizer = AutoTokenizer.from_pretrained(self.root / "tokenizer")
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(self.root / PROCESSOR, local_files_only=True)
        return {"tokenizer": tokenizer, PROCESSOR: image_text_processor(image_processor, tokenizer)}


class QwenImageEditPipeline(qwen_image.QwenImagePipeline):
    """Image editing with Qwen-Image-Edit."""

    def extra_components(self) -> Mapping[str, object]:
        """The processor, which diffusers can load only with torchvision."""
        return {name: part for name, part in self.bundle.tokenizers.items() if name == PROCESSOR}

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Writes the model, with the checkpoint's own processor files: ours lacks the part for videos."""
        written, root = super().write_model(tensors, folder), self.bundle.root
        if self.extra_components() and root is not None:
            shutil.copytree(root / PROCESSOR, written / PROCESSOR, dirs_exist_ok=True)
        return written

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Uses references of the sample's size and the image positions that the encoder was trained on."""
        num_tokens = self.embed(texts, params.max_sequence_length, images).embeds.shape[1]
        with references_of_sample_size(plain, params), image_token_types(plain), prompts_truncated(plain, num_tokens):
            return super().sample_with_diffusers(plain, texts, x_T, params, images)


def references_of_sample_size(plain: PlainPipeline, params: DiffusionSamplingParams) -> AbstractContextManager[object]:
    """Makes diffusers resize references to the size of the sample instead of an area of 1024 x 1024 pixels."""
    module = sys.modules[type(plain).__module__]
    original = module.calculate_dimensions

    def sized(pixels: int, ratio: float) -> tuple[object, ...]:
        dimensions: tuple[object, ...] = original(pixels, ratio)
        return (params.width, params.height, *dimensions[2:]) if pixels == REFERENCE_PIXELS else dimensions

    return patch.object(module, "calculate_dimensions", sized)


def prompts_truncated(plain: PlainPipeline, num_tokens: int) -> AbstractContextManager[object]:
    """Truncates the prompt embeddings of diffusers to `num_tokens`, the length that our encoder gives them.

    The editing pipelines of diffusers check `max_sequence_length` and then ignore it. Attention is causal, so cutting
    the embeddings equals cutting the tokens.
    """
    encode_prompt = plain.encode_prompt

    def truncated(*arguments: object, **named: object) -> tuple[Tensor, Tensor | None]:
        embeds, mask = encode_prompt(*arguments, **named)
        return embeds[:, :num_tokens], None if mask is None else mask[:, :num_tokens]

    return patch.object(plain, "encode_prompt", truncated)


def image_token_types(plain: PlainPipeline) -> AbstractContextManager[object]:
    """Tells Qwen2.5-VL which tokens belong to images.

    transformers 5 gives these tokens their two-dimensional positions only then. diffusers does not pass this argument,
    so its encoder gets positions that it was not trained on (https://github.com/huggingface/diffusers/issues/14194).
    """
    image_token = plain.tokenizer.convert_tokens_to_ids(IMAGE_PAD)

    def add_token_types(
        module: nn.Module, arguments: tuple[object, ...], named: dict[str, Tensor]
    ) -> tuple[tuple[object, ...], dict[str, Tensor]]:
        return arguments, {**named, "mm_token_type_ids": (named["input_ids"] == image_token).int()}

    encoder: nn.Module = plain.text_encoder
    return encoder.register_forward_pre_hook(add_token_types, with_kwargs=True)
