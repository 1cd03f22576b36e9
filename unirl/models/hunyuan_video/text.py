"""Prompts to what HunyuanVideo reads: a LLaMA's tokens of the prompt in its template, and CLIP's pooled text.

    tokens  [B, L, D]  = LLaMA's states two layers before its last, of TEMPLATE; the system text in front is cut off
    pooled  [B, D']    = CLIP-L's state at the end of the text

The same tensors as diffusers' `HunyuanVideoPipeline.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unirl.models.denoising.embeddings import causal_mask
from unirl.types.conditions import TextEmbedCondition

TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
"""What the model was trained to read its prompts in."""
CROP_START = 95
"""Tokens of the template before the prompt."""
SKIPPED_LAYERS = 2
CLIP_TOKENS = 77
LLAMA, CLIP = "text_encoder", "text_encoder_2"


class HunyuanVideoTextEncoder:
    """The two frozen encoders."""

    components: tuple[str, ...] = (LLAMA, CLIP)

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any]) -> None:
        self.llama, self.clip = modules[LLAMA], modules[CLIP]
        self.llama_tokenizer, self.clip_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts LLaMA tokens of prompt and template's end."""
        tokens, mask = self._tokens(list(texts), max_sequence_length)
        return TextEmbedCondition(embeds=tokens, mask=mask, pooled=self._pooled(list(texts)))

    def _tokens(self, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """States [B, L, D] and what of them is text [B, L]."""
        fed = _padded(self.llama_tokenizer, [TEMPLATE.format(text) for text in texts], CROP_START + length)
        device = next(self.llama.parameters()).device
        ids, mask = fed.input_ids.to(device), fed.attention_mask.to(device)
        states = self.llama(input_ids=ids, attention_mask=causal_mask(mask), output_hidden_states=True).hidden_states
        return states[-1 - SKIPPED_LAYERS][:, CROP_START:], mask[:, CROP_START:].bool()

    def _pooled(self, texts: list[str]) -> Tensor:
        """[B, D'] of CLIP."""
        ids = _padded(self.clip_tokenizer, texts, CLIP_TOKENS).input_ids
        pooled: Tensor = self.clip(ids.to(next(self.clip.parameters()).device)).pooler_output
        return pooled


def _padded(tokenizer: Any, texts: list[str], length: int) -> Any:
    return tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
