"""Compares the boxed answer of a response with the right answer as mathematics."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.reward.mathematics.answers import MathScorer, MathSpec, last_boxed


@dataclass(frozen=True, kw_only=True)
class MathBoxedSpec(MathSpec):
    """The place of the right answer, and the deadline of a comparison."""


class MathBoxedRewardScorer(MathScorer):
    r"""1 if the last \boxed{...} of the response equals the right answer; 0 for another one, or none."""

    name = "math_boxed"

    def __init__(self, *, config: MathBoxedSpec = MathBoxedSpec()) -> None:
        super().__init__(config)

    def answer_in(self, text: str) -> str:
        boxed = last_boxed(text)
        return "" if boxed is None else rf"\boxed{{{boxed}}}"
