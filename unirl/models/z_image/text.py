"""Prompts to what Z-Image reads: the states of Qwen3 before its last layer, of a chat.

    chat  <user: prompt> <assistant:        tokens  [B, L, D], of which the transformer takes those that are real

The same tensors as diffusers' `ZImagePipeline.encode_prompt`, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirl.models.denoising.embeddings import causal_mask
from unirl.types.conditions import TextEmbedCondition


class ZImageTextEncoder:
    """Qwen3, without its head."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, text_encoder: Any, tokenizer: Any) -> None:
        self.text_encoder = text_encoder  # transformers' Qwen3Model, which has no types
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of the whole chat."""
        batch = self.tokenizer(
            [self._chat(text) for text in texts],
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        mask = batch.attention_mask.bool()
        states = self.text_encoder(
            input_ids=batch.input_ids, attention_mask=causal_mask(mask), output_hidden_states=True, use_cache=False
        ).hidden_states
        return TextEmbedCondition(embeds=states[-2], mask=mask)

    def _chat(self, text: str) -> str:
        chat: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return chat
