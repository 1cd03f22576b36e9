"""Prompts to what the MMDiT reads: CLIP-L and CLIP-G side by side, then T5 after them.

    tokens  [B, 77, joint] = pad(CLIP-L penultimate | CLIP-G penultimate)   ++   [B, 256, joint] T5
    pooled  [B, D']        = CLIP-L projection | CLIP-G projection

The same tensors as diffusers' `StableDiffusion3Pipeline.encode_prompt`. A model without CLIP-G (one small encoder) has
the tokens and the projection of CLIP-L alone, and no T5 tokens; a full model whose T5 was left out keeps zeros in its
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unirl.types.conditions import TextEmbedCondition

CLIP = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
T5, T5_TOKENIZER = "text_encoder_3", "tokenizer_3"


class SD3TextEncoder:
    """The frozen encoders of a checkpoint."""

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any], joint_dim: int) -> None:
        """
        Args:
            modules: encoders by component name; other components are ignored.
            joint_dim: width of the tokens that the transformer reads.
        """
        self.modules = modules
        self.tokenizers = tokenizers
        self.joint_dim = joint_dim
        self.components = tuple(name for name in (*CLIP, T5) if name in modules)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts T5 tokens."""
        parts = [self._clip(name, list(texts)) for name in CLIP if name in self.modules]
        tokens = torch.cat([hidden for hidden, _ in parts], dim=-1)
        tokens = nn.functional.pad(tokens, (0, self.joint_dim - tokens.shape[-1]))
        if len(parts) == len(CLIP):
            tokens = torch.cat([tokens, self._t5(list(texts), max_sequence_length, tokens)], dim=1)
        return TextEmbedCondition(embeds=tokens, pooled=torch.cat([pooled for _, pooled in parts], dim=-1))

    def _clip(self, name: str, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Penultimate hidden states [B, 77, D] and projection [B, D'] of one CLIP encoder."""
        tokenizer = self.tokenizers[CLIP[name]]
        ids = _token_ids(tokenizer, texts, self.tokenizers["tokenizer"].model_max_length)
        out = self.modules[name](ids.to(_device(self.modules[name])), output_hidden_states=True)
        return out.hidden_states[-2], out[0]

    def _t5(self, texts: list[str], length: int, like: Tensor) -> Tensor:
        """T5 states [B, length, joint], or zeros where the encoder was left out."""
        if T5 not in self.modules:
            return like.new_zeros(len(texts), length, self.joint_dim)
        ids = _token_ids(self.tokenizers[T5_TOKENIZER], texts, length)
        hidden: Tensor = self.modules[T5](ids.to(like.device))[0]
        return hidden.to(like.dtype)


def _token_ids(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    ids: Tensor = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
