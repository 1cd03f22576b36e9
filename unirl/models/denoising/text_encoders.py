"""Tokens of prompts, and the text encoder that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unirl.types.conditions import TextEmbedCondition

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, device: torch.device, **options: object
) -> BatchEncoding:
    """`input_ids` and `attention_mask` [B, length] of `texts`, truncated or padded, on the device."""
    tokens = tokenizer(
        list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt", **options
    )
    return tokens.to(device, non_blocking=device.type != "cpu")


def longer_than(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> list[bool]:
    """Returns True for each text that `tokenize` truncates to `length` tokens."""
    # `verbose` warns of texts that are longer than the model reads, which is what is asked for.
    return [len(ids) > length for ids in tokenizer(list(texts), verbose=False).input_ids]


@dataclass(frozen=True)
class CausalTextEncoder:
    """A frozen causal language model without its head, which reads each prompt within a template."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: Callable[[str], str]
    """The text that the model reads for a prompt."""
    layers: Sequence[int] = (-2,)
    """The hidden states that are joined in each token; -2 are those before the last layer."""
    num_dropped: int = 0
    """Number of tokens at the beginning of the template, which the denoiser does not read."""
    components: tuple[str, ...] = ("text_encoder",)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts all tokens except the dropped ones."""
        length = self.num_dropped + max_sequence_length
        tokens = tokenize(self.tokenizer, [self.template(text) for text in texts], length, self.model.device)
        mask = tokens.attention_mask.bool()
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        states = self.model(
            input_ids=tokens.input_ids,
            # Explicit, because transformers uses another kernel, with other bits, for batches without padding.
            attention_mask=causal & mask[:, None, None, :],  # [B, 1, L, L]
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        embeds = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return TextEmbedCondition(embeds=embeds[:, self.num_dropped :], mask=mask[:, self.num_dropped :])

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        length = self.num_dropped + max_sequence_length
        return longer_than(self.tokenizer, [self.template(text) for text in texts], length)
