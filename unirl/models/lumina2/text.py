"""Prompts to what the transformer of Lumina-Image 2.0 reads: the last but one hidden states of Gemma 2.

The same tensors as diffusers' `Lumina2Pipeline.encode_prompt`. A prompt stands after the system's words, a negative
prompt stands alone, so the template is written by the pipeline, which knows which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirl.config.errors import InvalidValueError
from unirl.types.conditions import TextEmbedCondition

TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment "
    "based on textual prompts or user prompts. <Prompt Start> "
)


class Lumina2TextEncoder:
    """The frozen Gemma 2 of a checkpoint."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, encoder: Any, tokenizer: Any, most_tokens: int) -> None:
        """
        Args:
            encoder: transformers' `Gemma2Model`, which has no types.
            most_tokens: of a prompt, for which the transformer has positions.
        """
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.most_tokens = most_tokens

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts` as they stand; `max_sequence_length` counts the template's tokens too."""
        if max_sequence_length > self.most_tokens:
            raise InvalidValueError(
                f"sampling.max_sequence_length={max_sequence_length}: this model has positions for {self.most_tokens} "
                f"text tokens. Use {self.most_tokens} or fewer"
            )
        tokens = self.tokenizer(
            list(texts),
            padding="max_length",
            padding_side="right",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.encoder.device)
        states = self.encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        return TextEmbedCondition(embeds=states[-2], mask=tokens.attention_mask.bool())
