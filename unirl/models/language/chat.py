"""Converts texts to tokens and back: the tokenizer of a checkpoint, its chat template and its end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from unirl.config.errors import IncompatibleError, InvalidValueError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ContentPart(TypedDict, total=False):
    """A text or an image in the format of chat templates: its `type`, and the `text` of a text."""

    type: str
    text: str


UNFINISHED = "\ufffd"
"""The end of a text whose last token is only a part of a character."""
Content = str | list[ContentPart]
"""The content of a user's message."""


class TextCodec:
    """Converts texts to tokens and back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
        """`ends` are the tokens that end a response."""
        self.tokenizer = tokenizer
        self.ends = tuple(dict.fromkeys(ends))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without added special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens with special tokens written out. Stop strings are searched in this text."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The text that each token adds to those before it. Together they are `spell(tokens)`.

        A character of several tokens belongs to the last of them, and the others have "".
        """
        pieces: list[str] = []
        before = start = 0  # tokenizers of words write a space only after another token
        for end in range(1, len(tokens) + 1):
            known, text = self.spell(tokens[before:start]), self.spell(tokens[before:end])
            if text.endswith(UNFINISHED) and end < len(tokens):
                pieces.append("")
                continue
            pieces.append(text[len(known) :])
            before, start = start, end
        return tuple(pieces)


@dataclass(frozen=True)
class ChatFormat:
    """Renders a prompt as the text that the model reads."""

    codec: TextCodec
    chat: bool = True
    """False passes the prompt unchanged."""
    system_instruction: str | None = None
    enable_thinking: bool = False
    """Enables the thinking mode of chat templates that have one."""

    def __post_init__(self) -> None:
        if not self.chat and self.system_instruction is not None:
            raise InvalidValueError(
                "pipeline.system_instruction needs a chat, but pipeline.chat=false passes prompts unchanged: "
                "remove it, or write it into the prompts"
            )
        if self.chat and not self.codec.tokenizer.chat_template:
            raise IncompatibleError(
                f"pipeline.chat=true, but the tokenizer of this model ({type(self.codec.tokenizer).__name__}) has no "
                "chat template: set pipeline.chat=false to pass prompts unchanged, or use a chat model"
            )

    def text(self, content: Content) -> str:
        """The text that the model reads before it answers `content`."""
        if not self.chat:
            assert isinstance(content, str)
            return content
        return chat(self.codec.tokenizer, content, self.system_instruction, enable_thinking=self.enable_thinking)


def chat(tokenizer: PreTrainedTokenizerBase, content: Content, system: str | None = None, **options: object) -> str:
    """The chat with the user's message `content`, up to the beginning of the answer."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    rendered: str = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, **options
    )
    return rendered
