"""What a policy may call while it writes: tools answer in the text, and their words are context, never trained on.

... so it costs <calculator>3 * 19</calculator><result>57</result> and ...
    sampled                                    written by the tool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from unirl.models.language.arithmetic import FUNCTIONS, ExpressionError, Function, evaluate, spelled


class ToolBox(Protocol):
    """Tools of a rollout. A pure function of the text, so that a response can be drawn again."""

    closings: tuple[str, ...]
    """The strings that end a call: the box is asked only where a response ends in one of them."""
    instruction: str
    """What the model is told of them, behind the system instruction."""

    def answer(self, text: str) -> str | None:
        """What is written behind `text`, a response so far, or None where its end is no call."""
        ...


class ExpressionTool:
    """Answers `<name>expression</name>` with `<result>value</result>`; a mistake is named in the result."""

    def __init__(self, name: str, instruction: str, functions: Mapping[str, Function] | None) -> None:
        self.opening, self.closings = f"<{name}>", (f"</{name}>",)
        self.instruction = instruction
        self.functions = functions

    def answer(self, text: str) -> str | None:
        """The contract of `ToolBox`."""
        [closing] = self.closings
        body = text.rstrip().removesuffix(closing)
        start = body.rfind(self.opening)
        if body == text.rstrip() or start < 0:
            return None
        try:
            return f"<result>{spelled(evaluate(body[start + len(self.opening) :], self.functions))}</result>"
        except ExpressionError as error:
            return f"<result>error: {error}</result>"


class Calculator(ExpressionTool):
    """+ - * / % ^ and brackets, exact in fractions."""

    def __init__(self) -> None:
        super().__init__(
            "calculator",
            "To calculate, write <calculator>12 * (3 + 4)</calculator>; the value follows as <result>84</result>.",
            None,
        )


class ExpressionEvaluator(ExpressionTool):
    """The calculator's numbers, with names and functions: `x = 3; sqrt(x^2 + 16)`."""

    def __init__(self) -> None:
        super().__init__(
            "evaluate",
            "To evaluate expressions, write <evaluate>x = 3; sqrt(x^2 + 16)</evaluate>; the last value follows as "
            f"<result>5</result>. Functions: {', '.join(FUNCTIONS)}.",
            FUNCTIONS,
        )


class Tools:
    """Several boxes as one."""

    def __init__(self, *, boxes: Sequence[ToolBox]) -> None:
        self.boxes = tuple(boxes)
        self.closings = tuple(closing for box in boxes for closing in box.closings)
        self.instruction = "\n".join(box.instruction for box in boxes)

    def answer(self, text: str) -> str | None:
        """The first answer."""
        return next((said for box in self.boxes if (said := box.answer(text)) is not None), None)
