"""Prompts and the images beside them to what the MMDiT reads: the last hidden states of Qwen2.5-VL in a chat.

    chat    [opening | images | prompt | closing | padding]  --Qwen2.5-VL-->  [B, dropped + P + L, D]
    tokens  [B, P + L, D] without the opening, zero where padded,  P = tokens of the images and their marks

The same tensors as diffusers' `encode_prompt`, but of one length for all prompts; diffusers cuts no prompt, this does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.models.images import to_pil
from unirl.models.qwen_image.text import QwenImageTextEncoder
from unirl.models.qwen_image_edit.templates import IMAGE_PAD, EditTemplate
from unirl.types.conditions import TextEmbedCondition

SIDE_MULTIPLE = 32


class QwenImageEditTextEncoder(QwenImageTextEncoder):
    """The frozen Qwen2.5-VL, which sees the images."""

    template: EditTemplate

    def __init__(self, encoder: Any, tokenizer: Any, template: EditTemplate, image_processor: Any) -> None:
        """
        Args:
            image_processor: a `Qwen2VLImageProcessorPil`.
        """
        super().__init__(encoder, tokenizer, template)
        self.image_processor = image_processor

    def encode_with_images(self, texts: Sequence[str], max_sequence_length: int, images: Tensor) -> TextEmbedCondition:
        """The condition of `texts`, each with its images [B, N, 3, H, W] in [0, 1]."""
        resized = [self._seen(image) for image in images.flatten(0, 1)]
        found = self.image_processor(images=resized, return_tensors="pt")
        counts = found["image_grid_thw"].prod(1) // self.image_processor.merge_size**2
        num_images = images.shape[1]
        pieces = self.template.images(num_images).split(IMAGE_PAD)
        # Images of a call have one size, and so one number of places.
        places = [IMAGE_PAD * count for count in counts[:num_images].tolist()]
        shown = "".join(part for pair in zip(pieces, [*places, ""], strict=True) for part in pair)
        tokens = self._tokens(texts, self.template.opening + shown, max_sequence_length)
        seen = {name: found[name] for name in ("pixel_values", "image_grid_thw")}
        seen["mm_token_type_ids"] = self._places(tokens["input_ids"], shown.count(IMAGE_PAD))
        return self._states({**tokens, **seen})

    def _places(self, ids: Tensor, count: int) -> Tensor:
        """[B, L] 1 where a token stands for a piece of an image. Raises ValueError where a prompt spells one."""
        places = ids == self.tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        if bool((places.sum(1) != count).any()):
            raise ValueError(f"a prompt spells {IMAGE_PAD}, the model's own mark of an image. Take it out of the data")
        return places.int()

    def _seen(self, pixels: Tensor) -> Any:
        """The image [3, H, W] for the image processor, brought to the area that the template asks for."""
        from PIL import Image

        image = to_pil(pixels)
        if self.template.seen_pixels is None:
            return image
        size = size_of_area(self.template.seen_pixels, image.width / image.height)
        return image.resize((size.width, size.height), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Size:
    """Of an image, pixels."""

    width: int
    height: int


def size_of_area(pixels: int, ratio: float) -> Size:
    """About `pixels` at width / height = ratio, sides in multiples of 32."""
    width = math.sqrt(pixels * ratio)
    sides = [round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE for side in (width, width / ratio)]
    return Size(*sides)
