"""The sequence of HunyuanImage-3 before a text or an image, as tokens.

    instruct   <bos> system, User: prompt, Assistant: <think>...</think><recaption>...</recaption><answer> image
    pretrain   <bos> system prompt <think>...</think><recaption>...</recaption> image

Each comma is two line breaks, and each part is tokenized by itself. In the unconditional pass of guidance, every token
of the prompt and of the texts between the marks is <cfg>, so that both passes have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl.models.hunyuan_image3.packing import HEADER
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompt_tokens
from unirl.models.unified.pipeline import Written
from unirl.types.conditions import PromptTokens

SEPARATOR = "\n\n"
ANSWER, END_OF_ANSWER = "<answer>", "</answer>"
TEXT_TRACKS = ("think", "recaption")
TEMPLATE_TOKENS = 16 + HEADER
"""Tokens of a sequence beside the prompt, for plans: more than the template has without a system instruction."""


def end_of(track: str) -> str:
    """The mark that ends the text of a track."""
    return f"</{track}>" if track in TEXT_TRACKS else END_OF_ANSWER


def ratios(base: int) -> list[float]:
    """The 33 ratios of height to width that have a token, from wide to high, for images of about base x base pixels."""
    step = base // 16
    shorter = [max(base - i * step, base // 2) for i in range(17)]
    longer = [base + i * step for i in range(17)]
    wide = [short / long for short, long in zip(shorter, longer, strict=True)]
    return [*wide[::-1], *(1 / ratio for ratio in wide[1:])]


@dataclass(frozen=True)
class PromptFormat:
    """Prompts as tokens. The network embeds them itself, so no encoder runs."""

    codec: TextCodec
    base_size: int
    """Pixels along each side of a square image."""
    has_roles: bool
    """True for the template `instruct`, False for `pretrain`."""
    drops_think: bool = False
    """The image does not read the text of the track `think`."""
    system: str | None = None
    components: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> PromptTokens:
        """The sequence before an image for each text. Further tokens of a text than the length are cut off."""
        return prompt_tokens([self.drawing(self.cut(text, max_sequence_length), {}) for text in texts])

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        """True for each text of which tokens are cut off."""
        return [len(self.codec.encode(text)) > max_sequence_length for text in texts]

    def cut(self, text: str, max_sequence_length: int) -> list[int]:
        """The first tokens of a text."""
        return self.codec.encode(text)[:max_sequence_length]

    def writing(self, track: str, prompt: list[int], written: Written) -> list[int]:
        """The sequence before the text of a track."""
        begin = f"<{track}>" if track in TEXT_TRACKS else ""
        read = {track: self._inner(text) for track, text in written.items()}
        return [*self._context(prompt, read), *self.codec.encode(begin)]

    def drawing(self, prompt: list[int], written: Written, conditional: bool = True) -> list[int]:
        """The sequence before an image."""
        read = {track: text for track, text in written.items() if not (track == "think" and self.drops_think)}
        read = {track: self._inner(text) for track, text in read.items()}
        if not conditional:
            prompt, read = self._erased(prompt), {track: self._erased(text) for track, text in read.items()}
        return [*self._context(prompt, read), *self._role(ANSWER)]

    def header(self, rows: int, columns: int) -> list[int]:
        """The tokens between a prompt and an image of this ratio: <boi>, size, ratio, <timestep>."""
        all_ratios = ratios(self.base_size)
        nearest = min(range(len(all_ratios)), key=lambda i: abs(all_ratios[i] - rows / columns))
        marks = ("<boi>", f"<img_size_{self.base_size}>", f"<img_ratio_{nearest}>", "<timestep>")
        return [self.token(mark) for mark in marks]

    def token(self, mark: str) -> int:
        """The token of a mark, which the vocabulary has."""
        token: int = self.codec.tokenizer.get_vocab()[mark]
        return token

    def _context(self, prompt: list[int], written: Written) -> list[int]:
        """The system instruction, the prompt, and the texts before, each between its marks."""
        system = [] if self.system is None else [*self.codec.encode(self.system), *self._role(SEPARATOR)]
        user = [*self._role("User: "), *prompt, *self._role(SEPARATOR), *self._role("Assistant: ")]
        texts = [token for track, text in written.items() for token in self._marked(track, text)]
        bos = self.codec.tokenizer.bos_token_id
        assert isinstance(bos, int)
        return [bos, *system, *user, *texts]

    def _marked(self, track: str, text: list[int]) -> list[int]:
        """A text between its marks."""
        return [self.token(f"<{track}>"), *text, self.token(end_of(track))]

    def _inner(self, text: list[int]) -> list[int]:
        """The tokens of a text as they were sampled, without the end token, which a truncated text does not have."""
        return [token for token in text if token not in self.codec.ends]

    def _erased(self, tokens: list[int]) -> list[int]:
        return [self.token("<cfg>")] * len(tokens)

    def _role(self, text: str) -> list[int]:
        return self.codec.encode(text) if self.has_roles else []
