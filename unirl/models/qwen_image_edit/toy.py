"""The toy checkpoints: those of Qwen-Image, shown images. `toy-plus` combines several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.models.qwen_image.family import EDIT_PLUS
from unirl.models.qwen_image.toy import toy_checkpoint, toy_tokenizer, words_of
from unirl.models.qwen_image_edit.templates import EDIT_OPENING
from unirl.models.qwen_vl.sight import image_text_processor
from unirl.models.qwen_vl.toy import toy_image_processor

WORDS = words_of(EDIT_OPENING)
TOY = toy_checkpoint(WORDS)
TOY_PLUS = toy_checkpoint(WORDS, EDIT_PLUS, zero_cond_t=True)
"""References without noise of their own, as in the 2511 edition."""


def toy_tokenizers() -> Mapping[str, Any]:
    """The one of Qwen2.5-VL, and the processor of images around it."""
    tokenizer = toy_tokenizer(WORDS)
    return {"tokenizer": tokenizer, "processor": image_text_processor(toy_image_processor(), tokenizer)}
