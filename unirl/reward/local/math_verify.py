"""Whether a response has the right mathematics as its answer, wherever it stands."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.reward.mathematics.answers import MathScorer, MathSpec


@dataclass(frozen=True, kw_only=True)
class MathVerifySpec(MathSpec):
    """Where the right answer is, and how long a comparison may take."""


class MathVerifyRewardScorer(MathScorer):
    r"""1 if math-verify finds the right answer in the response: boxed, else announced as the answer, else the last."""

    name = "math_verify"

    def __init__(self, *, config: MathVerifySpec = MathVerifySpec()) -> None:
        super().__init__(config)

    def answer_in(self, text: str) -> str:
        return text
