"""A bundle of a language model: its network as a policy over tokens, and its tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unirl.config.errors import DataError
from unirl.models.autoregressive import ARStage
from unirl.models.base import Bundle
from unirl.models.chat import TextCodec
from unirl.models.hub import NOT_FOUND
from unirl.models.tools import ToolBox
from unirl.types.facts import LanguageFacts


class LanguageBundle(Bundle, ABC):
    """A causal language model of transformers, trained as a `TokenPolicy`."""

    facts: LanguageFacts

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        facts: LanguageFacts,
        codec: TextCodec,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(modules, facts, dtype=dtype, device=device)
        self.codec = codec

    def stage(self, tools: ToolBox | None = None) -> ARStage:
        """The trained network as a policy that samples and replays."""
        return ARStage(self.trainable(), self.facts, self.codec, self.dtype, tools)

    @abstractmethod
    def untrained(self) -> nn.Module:
        """A second network on the CPU, of transformers' own class, with the checkpoint's weights."""


def end_tokens(tokenizer: Any, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a response: those of the generation config or the model's, and the tokenizer's own."""
    found: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for config in configs:
        said = config.get("eos_token_id")
        found += said if isinstance(said, list) else [] if said is None else [said]
    return tuple(sorted(set(found)))


def require_vocabulary(tokenizer: Any, facts: LanguageFacts, path: str) -> None:
    """Raises DataError when the tokenizer knows tokens that the network has no row for."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= facts.vocab_size:
        raise DataError(
            f"{path}: its tokenizer has token {highest}, and the network embeds {facts.vocab_size}: they are not of "
            "one checkpoint. Download both again",
            code=NOT_FOUND,
        )
