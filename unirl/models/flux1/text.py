"""Prompts to what the transformer of FLUX.1 reads.

    tokens  [B, L, 4096] = T5, padding included      pooled  [B, 768] = CLIP-L at the end of the text

The same tensors as diffusers' `FluxPipeline.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unirl.types.conditions import TextEmbedCondition


class Flux1TextEncoder:
    """CLIP-L and T5."""

    components: tuple[str, ...] = ("text_encoder", "text_encoder_2")

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any]) -> None:
        """
        Args:
            modules: encoders by component name; other components are ignored.
        """
        self.clip, self.t5 = (modules[name] for name in self.components)
        self.clip_tokenizer, self.t5_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts T5 tokens."""
        device = next(self.t5.parameters()).device
        clip_ids = _token_ids(self.clip_tokenizer, texts, self.clip_tokenizer.model_max_length)
        t5_ids = _token_ids(self.t5_tokenizer, texts, max_sequence_length)
        pooled = self.clip(clip_ids.to(device)).pooler_output
        return TextEmbedCondition(embeds=self.t5(t5_ids.to(device))[0], pooled=pooled)


def _token_ids(tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
    """[B, length] ids, cut or padded."""
    ids: Tensor = tokenizer(
        list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids
