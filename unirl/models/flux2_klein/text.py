"""Prompts to what the transformer of FLUX.2-klein reads: three hidden states of Qwen3, side by side.

    chat  <user: prompt> <assistant: no thoughts>, padded to L      tokens  [B, L, 3 D] = layers N/4 | N/2 | 3N/4

The published encoders, Qwen3-4B and -8B, have N = 36 layers: theirs are 9, 18 and 27. The same tensors as diffusers'
`Flux2KleinPipeline.encode_prompt`; the transformer reads padding like any other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unirl.models.denoising.embeddings import causal_mask
from unirl.types.conditions import TextEmbedCondition

STACKED = 3
"""Hidden states side by side in a token."""


class KleinTextEncoder:
    """Qwen3, without its head."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, text_encoder: Any, tokenizer: Any) -> None:
        self.text_encoder = text_encoder  # transformers' Qwen3ForCausalLM, whose body alone is run
        self.tokenizer = tokenizer
        self.layers = stacked_layers(text_encoder.config.num_hidden_layers)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of the whole chat."""
        batch = self.tokenizer(
            [self._chat(text) for text in texts],
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        states = self.text_encoder.model(
            input_ids=batch.input_ids,
            attention_mask=causal_mask(batch.attention_mask),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        embeds = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return TextEmbedCondition(embeds=embeds, mask=batch.attention_mask.bool())

    def _chat(self, text: str) -> str:
        chat: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return chat


def stacked_layers(num_layers: int) -> tuple[int, ...]:
    """The layers, counted from 1, behind which the hidden states are read."""
    return tuple(num_layers * part // (STACKED + 1) for part in range(1, STACKED + 1))
