"""Prompts to what the MMDiT reads: the last hidden states of Qwen2.5-VL in a chat.

    chat    [opening | prompt | closing | padding]  --Qwen2.5-VL-->  [B, dropped + L, D]
    tokens  [B, L, D] without the opening, zero where padded

The same tensors as diffusers' `encode_prompt`, but of one length for all prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unirl.models.qwen_image.templates import CLOSING, Template, written
from unirl.types.conditions import TextEmbedCondition


class QwenImageTextEncoder:
    """The frozen Qwen2.5-VL, which reads."""

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
        return self._states(self._tokens(texts, self.template.opening, max_sequence_length))

    def _tokens(self, texts: Sequence[str], before: str, length: int) -> dict[str, Tensor]:
        """Ids and mask [B, tokens of `before` + length] of chats that begin with `before`."""
        found = self.tokenizer(
            [f"{before}{written(text)}{CLOSING}" for text in texts],
            padding="max_length",
            padding_side="right",
            max_length=len(self.tokenizer(before).input_ids) + length,
            truncation=True,
            return_tensors="pt",
        )
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def _states(self, inputs: Mapping[str, Tensor]) -> TextEmbedCondition:
        """What the encoder makes of `inputs`, without the opening of the chat."""
        device = self.encoder.device
        # Not the whole model: its head would make numbers of every word for every token.
        hidden = self.encoder.model(**{name: value.to(device) for name, value in inputs.items()}, use_cache=False)[0]
        kept = inputs["attention_mask"][:, self.template.num_dropped :].to(device).bool()
        embeds = hidden[:, self.template.num_dropped :].masked_fill(~kept[:, :, None], 0)
        return TextEmbedCondition(embeds=embeds, mask=kept)
