"""Compares a response with the right answer, word for word."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.reward.mathematics.answers import AnswerScorer, AnswerSpec


@dataclass(frozen=True, kw_only=True)
class ExactMatchSpec(AnswerSpec):
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""


class ExactMatchRewardScorer(AnswerScorer):
    """1 if the response equals the right answer, else 0. The amount of white space between words is ignored."""

    name = "exact_match"
    config: ExactMatchSpec

    def __init__(self, *, config: ExactMatchSpec = ExactMatchSpec()) -> None:
        super().__init__(config=config)

    def judge(self, text: str, answer: str) -> tuple[dict[str, float], str]:
        response = self._comparable(text)
        return {self.name: float(response == self._comparable(answer))}, response

    def _comparable(self, text: str) -> str:
        words = " ".join(text.split())
        return words.casefold() if self.config.ignore_case else words
