"""Compares the answer of a response, wherever it is, with the right answer as mathematics."""

from __future__ import annotations

from unirl.reward.mathematics.answers import MathScorer, MathSpec

MathVerifySpec = MathSpec


class MathVerifyRewardScorer(MathScorer):
    r"""1 if math-verify reads the right answer: the boxed one, else the announced one, else the last one."""

    name = "math_verify"

    def answer_in(self, text: str) -> str:
        return text
