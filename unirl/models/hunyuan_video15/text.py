"""Prompts to what HunyuanVideo 1.5 reads: Qwen2.5-VL's tokens of a chat, and ByT5's of the texts to be written.

    tokens  [B, L, D]    = Qwen's states two layers before its last, of the chat; the system message in front is cut off
    glyphs  [B, L2, D2]  = ByT5's states of what the prompt puts in quotes; none of them is real where it quotes nothing

The same tensors as diffusers' `HunyuanVideo15Pipeline.encode_prompt`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.denoising.embeddings import causal_mask
from unirl.types.conditions import TextEmbedCondition

SYSTEM_MESSAGE = (" " * 8).join(
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects: ",
        "1. The main content and theme of the video. ",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. ",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. ",
        "4. background environment, light, style and atmosphere. ",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
"""What the model was trained to read its prompts after."""
CROP_START = 108
"""Tokens of the chat before the prompt."""
SKIPPED_LAYERS = 2
GLYPH_TOKENS = 256
QUOTED = re.compile('"(.*?)"|\u201c(.*?)\u201d')
QWEN, BYT5 = "text_encoder", "text_encoder_2"


class HunyuanVideo15TextEncoder:
    """The two frozen encoders."""

    components: tuple[str, ...] = (QWEN, BYT5)

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any]) -> None:
        self.qwen, self.byt5 = modules[QWEN], modules[BYT5]
        self.qwen_tokenizer, self.byt5_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]
        self.glyph_tokens = glyph_tokens(self.byt5_tokenizer)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts Qwen's tokens of prompt and chat's end."""
        tokens, mask = self._tokens(texts, max_sequence_length)
        glyphs, glyph_mask = self._glyphs([glyph_text(text) for text in texts])
        return TextEmbedCondition(embeds=tokens, mask=mask, embeds_2=glyphs.to(tokens.dtype), mask_2=glyph_mask)

    def _tokens(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """States [B, L, D] and what of them is text [B, L]."""
        fed = self.qwen_tokenizer.apply_chat_template(
            [_chat(text) for text in texts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            padding="max_length",
            max_length=CROP_START + length,
            truncation=True,
            return_tensors="pt",
        )
        device = next(self.qwen.parameters()).device
        ids, mask = fed["input_ids"].to(device), fed["attention_mask"].to(device)
        states = self.qwen(input_ids=ids, attention_mask=causal_mask(mask), output_hidden_states=True).hidden_states
        return states[-1 - SKIPPED_LAYERS][:, CROP_START:], mask[:, CROP_START:].bool()

    def _glyphs(self, texts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """States [B, L2, D2], zeros where there is no text, and what of them is text [B, L2]."""
        weight = next(self.byt5.parameters())
        if not any(texts):
            shape = (len(texts), self.glyph_tokens)
            width = int(self.byt5.config.d_model)  # type: ignore[union-attr,arg-type]
            return weight.new_zeros(*shape, width), torch.zeros(shape, dtype=torch.bool, device=weight.device)
        # Rows without text run too, so that a row's bits do not depend on how many have some.
        fed = self.byt5_tokenizer(
            [text or "" for text in texts],
            padding="max_length",
            max_length=self.glyph_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(weight.device)
        states: Tensor = self.byt5(input_ids=fed.input_ids, attention_mask=fed.attention_mask.float())[0]
        written = torch.tensor([text is not None for text in texts], device=weight.device)[:, None]
        return states * written[..., None], fed.attention_mask.bool() & written


def glyph_tokens(tokenizer: Any) -> int:
    """ByT5 tokens of a prompt: 256, or as many as its tokenizer is limited to."""
    return min(GLYPH_TOKENS, int(tokenizer.model_max_length))


def glyph_text(prompt: str) -> str | None:
    """What ByT5 reads: each distinct text in straight or curly quotes; None where the prompt quotes nothing."""
    quoted = [straight or curly for straight, curly in QUOTED.findall(prompt)]
    return "".join(f'Text "{text}". ' for text in dict.fromkeys(quoted)) or None


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": text or " "}]
