"""Texts to tokens and back: the tokenizer of a checkpoint, its chat template, and what ends a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.config.errors import IncompatibleError, InvalidValueError

Content = str | list[dict[str, Any]]
"""What a user says: a text, or pieces of text and images as chat templates know them."""


class TextCodec:
    """Texts to tokens and back."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        """
        Args:
            tokenizer: one of transformers'.
            ends: the tokens of which each ends a response.
        """
        self.tokenizer = tokenizer
        self.ends = tuple(dict.fromkeys(ends))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, none added."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that a reader sees: special tokens are left out."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, special ones spelled out: what stop strings are looked for in."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


@dataclass(frozen=True)
class ChatFormat:
    """How a prompt is put before the model."""

    codec: TextCodec
    chat: bool = True
    """False feeds the prompt as it is."""
    system_instruction: str | None = None
    enable_thinking: bool = False
    """Lets models think aloud whose chat template has such a switch."""

    def __post_init__(self) -> None:
        if not self.chat and self.system_instruction is not None:
            raise InvalidValueError(
                "pipeline.system_instruction belongs to a chat, and pipeline.chat=false feeds prompts as they are: "
                "leave it out, or write it into the prompts"
            )
        if self.chat and not self.codec.tokenizer.chat_template:
            raise IncompatibleError(
                f"pipeline.chat=true, and the tokenizer of this model ({type(self.codec.tokenizer).__name__}) has no "
                "chat template: set pipeline.chat=false to feed prompts as they are, or use a model that was made "
                "for chats"
            )

    def text(self, content: Content) -> str:
        """What the model reads before it answers `content`."""
        if not self.chat:
            assert isinstance(content, str)
            return content
        system = [] if self.system_instruction is None else [{"role": "system", "content": self.system_instruction}]
        rendered: str = self.codec.tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.enable_thinking,
        )
        return rendered
