"""Whether a response is the right answer, word for word."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.reward.mathematics.answers import AnswerScorer, AnswerSpec, AnswerVerdict


@dataclass(frozen=True, kw_only=True)
class ExactMatchSpec(AnswerSpec):
    """What counts as the same."""

    ignore_case: bool = False


class ExactMatchRewardScorer(AnswerScorer):
    """1 if the response equals the right answer, white space at the ends and its amount between words aside; else 0."""

    name = "exact_match"
    config: ExactMatchSpec

    def __init__(self, *, config: ExactMatchSpec = ExactMatchSpec()) -> None:
        super().__init__(config)

    def judge(self, text: str, answer: str) -> AnswerVerdict:
        said = self._comparable(text)
        return AnswerVerdict({self.name: float(said == self._comparable(answer))}, said)

    def _comparable(self, text: str) -> str:
        words = " ".join(text.split())
        return words.casefold() if self.config.ignore_case else words
