"""Compares the letter that a response to a multiple-choice question gives with the right one."""

from __future__ import annotations

import re

from unirl.config.errors import RewardError
from unirl.reward.mathematics.answers import AnswerScorer, AnswerSpec, last_boxed

MCExactMatchSpec = AnswerSpec

LETTER = re.compile(r"\W*([A-Za-z])\W*")
ANNOUNCED = re.compile(r"(?i:answer)\W*(?i:is|:|=)?[\s:*_({\[]*([A-Z])(?![A-Za-z0-9'])")


class MCExactMatchRewardScorer(AnswerScorer):
    r"""1 if the chosen letter is the right one, else 0. A response without a choice scores 0.

    The chosen letter is the first of the following that exists: the content of the last \boxed{...}, if that is one
    letter with punctuation; the capital letter after the last "answer", "answer is" or "answer:" that has one; the
    whole response, if that is one letter with punctuation.
    """

    name = "mc_exact_match"

    def read_answer(self, answer: str) -> str:
        letter = LETTER.fullmatch(answer)
        if not letter:
            raise RewardError(f"the right answer {answer!r} is not the letter of a choice. Write it like 'B'")
        return letter[1].upper()

    def judge(self, text: str, answer: str) -> tuple[dict[str, float], str]:
        letter = chosen(text)
        return {self.name: float(letter == answer)}, letter or ""


def chosen(text: str) -> str | None:
    """Returns the letter that a response chooses, as a capital letter."""
    boxed = LETTER.fullmatch(last_boxed(text) or "")
    if boxed:
        return boxed[1].upper()
    announced = ANNOUNCED.findall(text)
    if announced:
        return str(announced[-1])
    alone = LETTER.fullmatch(text)
    return alone[1].upper() if alone else None
