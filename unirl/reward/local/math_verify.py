"""Compares the answer of a response, wherever it is, with the right answer as mathematics."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.reward.mathematics.answers import MathScorer, MathSpec


@dataclass(frozen=True, kw_only=True)
class MathVerifySpec(MathSpec):
    """The place of the right answer, and the deadline of a comparison."""


class MathVerifyRewardScorer(MathScorer):
    r"""1 if math-verify reads the right answer: the boxed one, else the announced one, else the last one."""

    name = "math_verify"

    def __init__(self, *, config: MathVerifySpec = MathVerifySpec()) -> None:
        super().__init__(config)

    def answer_in(self, text: str) -> str:
        return text
