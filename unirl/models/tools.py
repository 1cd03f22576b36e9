"""What a policy may call while it writes: tools answer in the text, and their words are context, never trained on."""

from __future__ import annotations

from typing import Protocol


class ToolBox(Protocol):
    """Tools of a rollout. A pure function of the text, so that a response can be drawn again."""

    closings: tuple[str, ...]
    """The strings that end a call: the box is asked only where a response ends in one of them."""
    instruction: str
    """What the model is told of them, in the system instruction."""

    def answer(self, text: str) -> str | None:
        """What is written behind `text`, a response so far, or None where its end is no call."""
        ...
