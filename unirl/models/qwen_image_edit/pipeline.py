"""Editing of images with Qwen-Image-Edit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.images import to_pil
from unirl.models.qwen_image.pipeline import drawn
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle
from unirl.models.qwen_image_edit.family import PROCESSOR
from unirl.models.qwen_image_edit.templates import IMAGE_PAD
from unirl.types.sampling import DiffusionSamplingParams

REFERENCE_PIXELS = 1024 * 1024
"""The area that diffusers brings the images to whose latents the transformer reads."""


class QwenImageEditPipeline(DiffusersPipeline[QwenImageEditBundle]):
    """Guidance, schedule and conditioning are the general ones."""

    def extra_components(self) -> Mapping[str, object]:
        """The processor: diffusers' own way to read it needs torchvision."""
        return {name: part for name, part in self.bundle.tokenizers.items() if name == PROCESSOR}

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """The processor's files as the checkpoint has them: ours reads no videos, and would write none of its part."""
        written_to, family, path = super().write_model(tensors, folder), self.bundle.family, self.bundle.path
        if self.extra_components() and not family.is_toy(path):
            root = family.directory(path, self.bundle.revision)
            shutil.copytree(root / PROCESSOR, written_to / PROCESSOR, dirs_exist_ok=True)
        return written_to

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """References of the size drawn, and the encoder's positions of images as it was trained with."""
        assert images is not None  # facts.condition_images: at least one
        shown = [[to_pil(pixels) for pixels in row.pixels] for row in images]
        num_tokens = self.embed(texts, params.max_sequence_length, images).embeds.shape[1]
        with references_of_size(plain, params), places_known(plain), prompts_truncated(plain, num_tokens):
            if self.facts.condition_images == (1, 1):  # one image of each prompt
                return drawn(plain, texts, x_T, params, image=[row[0] for row in shown])
            rows = range(len(texts))  # one prompt a call, with any number of images
            return torch.cat([drawn(plain, [texts[i]], x_T[i : i + 1], params, image=shown[i]) for i in rows])


@contextmanager
def references_of_size(plain: PlainPipeline, params: DiffusionSamplingParams) -> Iterator[None]:
    """diffusers brings references to the size drawn instead of 1024 x 1024 pixels in area."""
    module: Any = sys.modules[type(plain).__module__]
    rule = module.calculate_dimensions

    def sized(pixels: int, ratio: float) -> tuple[object, ...]:
        found: tuple[object, ...] = rule(pixels, ratio)
        return (params.width, params.height, *found[2:]) if pixels == REFERENCE_PIXELS else found

    module.calculate_dimensions = sized
    try:
        yield
    finally:
        module.calculate_dimensions = rule


@contextmanager
def prompts_truncated(plain: PlainPipeline, num_tokens: int) -> Iterator[None]:
    """Truncates the prompt embeddings of diffusers to `num_tokens`, the length that our encoder gives them.

    The editing pipelines of diffusers check `max_sequence_length` and then ignore it. Attention is causal, so cutting
    the embeddings equals cutting the tokens.
    """
    encode_prompt = plain.encode_prompt

    def truncated(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        embeds, mask = encode_prompt(*arguments, **named)
        return embeds[:, :num_tokens], None if mask is None else mask[:, :num_tokens]

    plain.encode_prompt = truncated
    try:
        yield
    finally:
        plain.encode_prompt = encode_prompt


@contextmanager
def places_known(plain: PlainPipeline) -> Iterator[None]:
    """Qwen2.5-VL is told which tokens stand for images.

    transformers 5 gives them positions in the image only then; diffusers leaves it out and so silently feeds the
    encoder positions that it was not trained with (https://github.com/huggingface/diffusers/issues/14194).
    """
    image = plain.tokenizer.convert_tokens_to_ids(IMAGE_PAD)

    def tell(module: object, arguments: tuple[object, ...], named: dict[str, Any]) -> Any:
        return arguments, {**named, "mm_token_type_ids": (named["input_ids"] == image).int()}

    handle = plain.text_encoder.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
