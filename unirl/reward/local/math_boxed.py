"""Compares the boxed answer of a response with the right answer as mathematics."""

from __future__ import annotations

from unirl.reward.mathematics.answers import MathScorer, MathSpec, last_boxed

MathBoxedSpec = MathSpec


class MathBoxedRewardScorer(MathScorer):
    r"""1 if the last \boxed{...} of the response equals the right answer; 0 for another one, or none."""

    name = "math_boxed"

    def answer_in(self, text: str) -> str:
        boxed = last_boxed(text)
        return "" if boxed is None else rf"\boxed{{{boxed}}}"
