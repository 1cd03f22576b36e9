"""Compares the final number of a response, in the form of GSM8K (arXiv:2110.14168) `#### 42`, with the right number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from unirl.config.errors import RewardError
from unirl.reward.mathematics.answers import AnswerScorer, AnswerSpec

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARK = "####"


@dataclass(frozen=True, kw_only=True)
class GSM8KExactMatchSpec(AnswerSpec):
    method: Literal["strict", "flexible"] = "strict"
    """strict: the number right after the last ####; flexible: the last number of the response."""
    format_score: float = 0.0
    """The score of a wrong number in the right form."""


class GSM8KExactMatchRewardScorer(AnswerScorer):
    """1 if the response's number is the right one, `format_score` if it has another, 0 if it has none.

    Numbers are compared by value: 1,000, 1000.0 and $1000 are equal. The right answer is a number, or a solution in the
    form of the data set, which ends with #### and the number.
    """

    name = "gsm8k_exact_match"
    config: GSM8KExactMatchSpec

    def __init__(self, *, config: GSM8KExactMatchSpec = GSM8KExactMatchSpec()) -> None:
        super().__init__(config=config)

    def read_answer(self, answer: str) -> str:
        number = NUMBER.fullmatch(answer.rpartition(MARK)[2].strip())
        if not number:
            raise RewardError(f"the right answer {answer!r} is not a number. Write it like '42' or '... {MARK} 42'")
        return number[0]

    def judge(self, text: str, answer: str) -> tuple[dict[str, float], str]:
        number = self._number_in(text)
        if number is None:
            return {self.name: 0.0}, ""
        right = value(number) == value(answer)
        return {self.name: 1.0 if right else self.config.format_score}, plain(number)

    def _number_in(self, text: str) -> str | None:
        if self.config.method == "flexible":
            return (NUMBER.findall(text) or [None])[-1]
        _, mark, after = text.rpartition(MARK)
        number = NUMBER.match(after.lstrip()) if mark else None
        return number[0] if number else None


def value(number: str) -> Decimal:
    """Returns the value of a number like -$1,000.50."""
    return Decimal(re.sub("[$,]", "", number))


def plain(number: str) -> str:
    """Returns the canonical form of a number: 1000.5 for $1,000.50."""
    digits = f"{value(number):f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
