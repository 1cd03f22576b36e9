"""Prompts, and pictures beside them, to what the MMDiT reads: the last hidden states of Qwen2.5-VL in a chat.

    chat    [opening | pictures | prompt | closing | padding]  --Qwen2.5-VL-->  [B, dropped + P + L, D]
    tokens  [B, P + L, D] without the opening, zero where padded,  P = tokens of the pictures and their marks

The same tensors as diffusers' `encode_prompt`, but of one length for all prompts; where a picture is edited, diffusers
cuts no prompt, and this does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.models.pictures import picture_of
from unirl.models.qwen_image.templates import CLOSING, IMAGE_PAD, Template, written
from unirl.types.conditions import TextEmbedCondition

SIDE_MULTIPLE = 32


class QwenImageTextEncoder:
    """The frozen Qwen2.5-VL of a checkpoint that draws."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, encoder: Any, tokenizer: Any, template: Template) -> None:
        """
        Args:
            encoder: transformers' `Qwen2_5_VLForConditionalGeneration`, which has no types.
        """
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.template = template

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of a prompt and of the chat's closing."""
        return self._states(texts, "", max_sequence_length, {})

    def _states(self, texts: Sequence[str], pictures: str, length: int, seen: dict[str, Tensor]) -> TextEmbedCondition:
        """
        Args:
            pictures: what stands for a prompt's pictures before it, places and all.
            length: tokens after them.
            seen: the pictures as the vision tower takes them; empty = there are none.
        """
        before = self.template.opening + pictures
        chats = [f"{before}{written(text)}{CLOSING}" for text in texts]
        found = self.tokenizer(
            chats,
            padding="max_length",
            padding_side="right",
            max_length=len(self.tokenizer(before).input_ids) + length,
            truncation=True,
            return_tensors="pt",
        )
        ids, mask = found.input_ids, found.attention_mask
        if seen:
            seen = {**seen, "mm_token_type_ids": self._places(ids, before)}
        device = self.encoder.device
        inputs = {"input_ids": ids, "attention_mask": mask, **seen}
        # Not the whole model: its head would make numbers of every word for every token.
        hidden = self.encoder.model(**{name: value.to(device) for name, value in inputs.items()}, use_cache=False)[0]
        kept = mask[:, self.template.num_dropped :].to(device).bool()
        embeds = hidden[:, self.template.num_dropped :].masked_fill(~kept[:, :, None], 0)
        return TextEmbedCondition(embeds=embeds, mask=kept)

    def _places(self, ids: Tensor, before: str) -> Tensor:
        """[B, L] 1 where a token stands for a piece of a picture. Raises ValueError where a prompt spells one."""
        places = ids == self.tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        if bool((places.sum(1) != before.count(IMAGE_PAD)).any()):
            raise ValueError(f"a prompt spells {IMAGE_PAD}, the model's own mark of a picture. Take it out of the data")
        return places.int()


class QwenImageEditTextEncoder(QwenImageTextEncoder):
    """The same encoder of a checkpoint that edits: it sees the pictures."""

    def __init__(self, encoder: Any, tokenizer: Any, template: Template, image_processor: Any) -> None:
        """
        Args:
            image_processor: a `Qwen2VLImageProcessorPil`.
        """
        super().__init__(encoder, tokenizer, template)
        self.image_processor = image_processor

    def encode_seeing(self, texts: Sequence[str], max_sequence_length: int, pictures: Tensor) -> TextEmbedCondition:
        """The condition of `texts`, each with its pictures [B, N, 3, H, W] in [0, 1]."""
        images = [self._seen(picture) for picture in pictures.flatten(0, 1)]
        found = self.image_processor(images=images, return_tensors="pt")
        counts = found["image_grid_thw"].prod(1) // self.image_processor.merge_size**2
        num_pictures = pictures.shape[1]
        pieces = self.template.pictures(num_pictures).split(IMAGE_PAD)
        # Pictures of a call have one size, and so one number of places.
        places = [IMAGE_PAD * count for count in counts[:num_pictures].tolist()]
        before = "".join(part for pair in zip(pieces, [*places, ""], strict=True) for part in pair)
        seen = {name: found[name] for name in ("pixel_values", "image_grid_thw")}
        return self._states(texts, before, max_sequence_length, seen)

    def _seen(self, picture: Tensor) -> Any:
        """The picture [3, H, W] for the image processor, brought to the area that the template asks for."""
        from PIL import Image

        image = picture_of(picture)
        if self.template.seen_pixels is None:
            return image
        size = size_of_area(self.template.seen_pixels, image.width / image.height)
        return image.resize((size.width, size.height), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Size:
    """Of a picture, pixels."""

    width: int
    height: int


def size_of_area(pixels: int, ratio: float) -> Size:
    """About `pixels` at width / height = ratio, sides in multiples of 32."""
    width = math.sqrt(pixels * ratio)
    sides = [round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE for side in (width, width / ratio)]
    return Size(*sides)
