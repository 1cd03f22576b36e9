"""Tools that a policy may call within a response. Their answers are part of the text, and are never trained on.

... so it costs <calculator>3 * 19</calculator><result>57</result> and ...
                sampled                           written by the tool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from unirl.models.language.arithmetic import FUNCTIONS, ExpressionError, Function, evaluate, format_value


class ToolBox(Protocol):
    """The tools of a rollout. `answer` is a pure function of the text, so that a response can be sampled again."""

    closings: tuple[str, ...]
    """The closing tags of calls. `answer` is called only after a response that ends in one of them."""
    instruction: str
    """The description of the tools that is appended to the system instruction."""

    def answer(self, text: str) -> str | None:
        """The text to append to the response `text`. None if it does not end in a call."""


class ExpressionTool:
    """Answers `<name>expression</name>` with `<result>value</result>`; an error is named in the result."""

    def __init__(self, name: str, instruction: str, functions: Mapping[str, Function] | None) -> None:
        self.opening, self.closings = f"<{name}>", (f"</{name}>",)
        self.instruction = instruction
        self.functions = functions

    def answer(self, text: str) -> str | None:
        [closing] = self.closings
        body = text.rstrip().removesuffix(closing)
        start = body.rfind(self.opening)
        if body == text.rstrip() or start < 0:
            return None
        try:
            return f"<result>{format_value(evaluate(body[start + len(self.opening) :], self.functions))}</result>"
        except ExpressionError as error:
            return f"<result>error: {error}</result>"


class Calculator(ExpressionTool):
    """Evaluates + - * / % ^ and brackets exactly, as fractions."""

    def __init__(self) -> None:
        super().__init__(
            "calculator",
            "To calculate, write <calculator>12 * (3 + 4)</calculator>; the value follows as <result>84</result>.",
            None,
        )


class ExpressionEvaluator(ExpressionTool):
    """Evaluates the calculator's expressions with variables and functions: `x = 3; sqrt(x^2 + 16)`."""

    def __init__(self) -> None:
        super().__init__(
            "evaluate",
            "To evaluate expressions, write <evaluate>x = 3; sqrt(x^2 + 16)</evaluate>; the last value follows as "
            f"<result>5</result>. Functions: {', '.join(FUNCTIONS)}.",
            FUNCTIONS,
        )


class Tools:
    """Several tool boxes as one."""

    def __init__(self, *, boxes: Sequence[ToolBox]) -> None:
        self.boxes = tuple(boxes)
        self.closings = tuple(closing for box in boxes for closing in box.closings)
        self.instruction = "\n".join(box.instruction for box in boxes)

    def answer(self, text: str) -> str | None:
        """The answer of the first box that has one."""
        return next((answer for box in self.boxes if (answer := box.answer(text)) is not None), None)
