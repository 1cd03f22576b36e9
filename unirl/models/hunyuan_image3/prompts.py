"""The sequence of HunyuanImage-3 before a text or an image, as tokens.

    instruct   <bos> system, User: prompt, Assistant: <think>...</think><recaption>...</recaption><answer> image
    pretrain   <bos> system prompt <think>...</think><recaption>...</recaption> image

Each comma is two line breaks, and each part is tokenized by itself. In the unconditional pass of guidance, every token
of the prompt and of the texts between the marks is <cfg>, so that both passes have the same length. Images in the
prompt stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl.models.hunyuan_image3.packing import HEADER
from unirl.models.images import IMAGE_MARK
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompt_tokens
from unirl.models.unified.pipeline import Written
from unirl.types.conditions import PromptTokens

IMAGE = -1
"""Stands for a whole image among the tokens of a prompt."""
SEPARATOR = "\n\n"
ANSWER, END_OF_ANSWER = "<answer>", "</answer>"
TEXT_TRACKS = ("think", "recaption")
TEMPLATE_TOKENS = 16 + HEADER
"""Tokens of a sequence beside the prompt, for plans: more than the template has without a system instruction."""


def end_of(track: str) -> str:
    """The mark that ends the text of a track."""
    return f"</{track}>" if track in TEXT_TRACKS else END_OF_ANSWER


Size = tuple[int, int]
"""Height and width in pixels."""
FURTHER_SIZES: tuple[Size, ...] = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
"""Sizes with common ratios, whose tokens the checkpoints after the first one have as well."""


def sizes_of(base: int, has_further_sizes: bool) -> list[Size]:
    """The sizes whose ratio has a token, in the order of the tokens: 33 of about base x base pixels, from wide to high.

    Args:
        has_further_sizes: those of FURTHER_SIZES follow, if their ratio is a new one.
    """
    step = base // 16
    shorter = [max(base - i * step, base // 2) for i in range(17)]
    longer = [base + i * step for i in range(17)]
    wide = list(zip(shorter, longer, strict=True))
    sizes = [*wide[::-1], *((width, height) for height, width in wide[1:])]
    ratios = {height / width for height, width in sizes}
    return sizes + [size for size in FURTHER_SIZES if has_further_sizes and size[0] / size[1] not in ratios]


def nearest_ratio(sizes: Sequence[Size], ratio: float) -> int:
    """The number of the size whose height divided by width is nearest to `ratio`."""
    return min(range(len(sizes)), key=lambda i: abs(sizes[i][0] / sizes[i][1] - ratio))


@dataclass(frozen=True)
class PromptFormat:
    """Prompts as tokens. The network embeds them itself, so no encoder runs."""

    codec: TextCodec
    base_size: int
    """Pixels along each side of a square image."""
    sizes: tuple[Size, ...]
    """See `sizes_of`."""
    has_roles: bool
    """True for the template `instruct`, False for `pretrain`."""
    drops_think: bool = False
    """The image does not read the text of the track `think`."""
    reads_images: bool = False
    """Prompts have images, each at the place of an IMAGE_MARK."""
    system: str | None = None
    components: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> PromptTokens:
        """The sequence before an image for each text. Further tokens of a text than the length are cut off."""
        return prompt_tokens([self.drawing(self.user(text, max_sequence_length), {}) for text in texts])

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        """True for each text of which tokens are cut off."""
        return [self.user(text) != self.user(text, max_sequence_length) for text in texts]

    def user(self, text: str, max_sequence_length: int | None = None) -> list[int]:
        """The tokens of a prompt, with IMAGE for each image. Each part between images is tokenized by itself.

        Args:
            max_sequence_length: further tokens of the text are cut off. No image is.
        """
        tokens: list[int] = []
        left = max_sequence_length
        for number, part in enumerate(text.split(IMAGE_MARK) if self.reads_images else [text]):
            own = self.codec.encode(part)[:left]
            left = None if left is None else left - len(own)
            tokens += [*[IMAGE][:number], *own]
        return tokens

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
        return self.header_of(nearest_ratio(self.sizes, rows / columns))

    def header_of(self, number: int) -> list[int]:
        """The same for the ratio of this number."""
        marks = ("<boi>", f"<img_size_{self.base_size}>", f"<img_ratio_{number}>", "<timestep>")
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
        """<cfg> in place of every token. Images stay."""
        return [token if token == IMAGE else self.token("<cfg>") for token in tokens]

    def _role(self, text: str) -> list[int]:
        return self.codec.encode(text) if self.has_roles else []
