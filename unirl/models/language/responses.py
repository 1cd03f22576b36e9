"""How a response grows: what ends it, and what tools write into it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from unirl.models.language.chat import TextCodec
from unirl.models.language.tools import ToolBox
from unirl.types.sampling import ARSamplingParams


@dataclass
class Response:
    """One response in the making."""

    row: int
    id: str
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)
    """Tokens that come next, whatever would be drawn."""
    finished: bool = False
    """It ended by itself."""
    cut: bool = False
    """It is as long as it may be."""

    @property
    def is_over(self) -> bool:
        return self.finished or self.cut


class ResponseBuilder:
    """What ends responses: tokens, further strings, the longest length. Tools write before the next draw."""

    def __init__(self, codec: TextCodec, params: ARSamplingParams, tools: ToolBox | None) -> None:
        self.codec = codec
        self.params = params
        self.tools = tools
        self.watched = (*params.stop, *(tools.closings if tools is not None else ()))
        """Strings that are looked for after every token."""
        # A token may spell a part of a letter only, and special tokens may spell nothing.
        self.window = max((len(text.encode()) for text in self.watched), default=0) + 8

    def extend(self, response: Response, token: int, logp: float) -> None:
        """`response` with one more token: a forced one, or `token` as it was drawn."""
        sampled = not response.forced
        if response.forced:
            token = response.forced.popleft()
        response.tokens.append(token)
        response.logps.append(logp)
        response.sampled.append(sampled)
        length = len(response.tokens)
        if sampled:
            spelled = self._just_spelled(response.tokens)
            stopped = length >= self.params.min_new_tokens and any(text in spelled for text in self.params.stop)
            response.finished = stopped or token in self.codec.ends
            if self.tools is not None and any(text in spelled for text in self.tools.closings):
                answer = self.tools.answer(self.codec.spell(response.tokens))
                response.forced.extend([] if answer is None else self.codec.encode(answer))
        response.cut = not response.finished and length >= self.params.max_new_tokens

    def _just_spelled(self, tokens: list[int]) -> list[str]:
        """The watched strings that the last token completes."""
        if not self.watched:
            return []
        tail = tokens[-self.window :]
        now, before = self.codec.spell(tail), self.codec.spell(tail[:-1])
        return [text for text in self.watched if now.count(text) > before.count(text)]
