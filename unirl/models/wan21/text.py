"""Prompts to what Wan reads: UMT5's states of the real tokens, then zeros.

    tokens  [B, L, D] = UMT5(cleaned prompt)   ++   0 to max_sequence_length

The same tensors as diffusers' `WanPipeline.encode_prompt`. The transformer attends to the zeros: there is no mask. A
transformer that reads CLIP's tokens takes the last 512 tokens for text, so its zeros reach that length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from unirl.config.errors import InvalidValueError
from unirl.types.conditions import TextEmbedCondition


class WanTextEncoder:
    """The frozen UMT5."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, encoder: Any, tokenizer: Any, fixed_length: int | None = None) -> None:
        """
        Args:
            fixed_length: of the tokens, whatever the longest prompt may be; absent = as long as that.
        """
        self.encoder = encoder  # transformers' UMT5EncoderModel
        self.tokenizer = tokenizer
        self.fixed_length = fixed_length

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`, each cut and padded to `max_sequence_length` tokens."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        tokens = self.tokenizer(
            [prompt_clean(text) for text in texts],
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self.encoder.device)
        states = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        mask = tokens.attention_mask > 0
        embeds = torch.where(mask[..., None], states, 0.0)
        missing = 0 if self.fixed_length is None else self.fixed_length - max_sequence_length
        if missing < 0:
            raise InvalidValueError(
                f"sampling.max_sequence_length={max_sequence_length}: this transformer reads {self.fixed_length} "
                f"tokens of text. Use at most {self.fixed_length}"
            )
        return TextEmbedCondition(embeds=pad(embeds, (0, 0, 0, missing)), mask=pad(mask, (0, missing)))
