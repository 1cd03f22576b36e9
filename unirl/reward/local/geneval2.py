"""GenEval 2: every fact of a prompt is asked of a judge (Soft-TIFA). arXiv:2512.16853.

p_i = P(the judge begins its answer to question i with the right word);  am = mean p_i;  gm = (prod p_i)^(1/n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unirl.config.errors import RewardError
from unirl.reward.judges.endpoint import JudgeReply, JudgeSpec
from unirl.reward.judges.judge import JudgeScorer

KEY = "vqa_list"
ONE_WORD = "{question} Answer in one word."
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMERALS = {word: str(number) for number, word in enumerate(NUMBERS)}
MAX_WORD = 16
"""Tokens of an answer in one word."""
SHORTEST = 3
"""Letters of a longer word that its first token must have to count as its beginning."""


@dataclass(frozen=True, kw_only=True)
class GenEval2Spec(JudgeSpec):
    """The judge, and how its answers become one number."""

    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    aggregation: Literal["gm", "am"] = "gm"
    """gm: geometric mean, 0 as soon as one fact is surely wrong; am: arithmetic mean."""
    soft: bool = True
    """Probabilities, which the endpoint must give as log-probs; False: 1 or 0, whether the judge's word is right."""


class GenEval2RewardScorer(JudgeScorer):
    """Soft-TIFA in [0, 1]: the mean over the prompt's questions of the probability of the right answer.

    Metadata `vqa_list` holds pairs [question, answer in one word]; without any there is no score. One request each.
    The probability is that of first tokens which are the answer, in any case, as a word or a numeral, or at least three
    letters of its beginning; of the 20 likeliest tokens, so it may be too small by what the others hold.
    """

    names = ("geneval2", "geneval2_gm", "geneval2_am")
    reads = ("images", "metadata")
    config: GenEval2Spec

    def __init__(self, *, config: GenEval2Spec) -> None:
        super().__init__(config)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        questions_of(metadata)

    def score_image(self, picture: bytes, prompt: str, metadata: Mapping[str, Any]) -> Mapping[str, float]:
        right = [self._right(picture, question, answer) for question, answer in questions_of(metadata)]
        means = {"geneval2_gm": geometric_mean(right), "geneval2_am": sum(right) / len(right)}
        return {"geneval2": means[f"geneval2_{self.config.aggregation}"], **means}

    def _right(self, picture: bytes, question: str, answer: str) -> float:
        reply = self.judge.ask(
            picture, ONE_WORD.format(question=question), 1 if self.config.soft else 16, self.config.soft
        )
        return probability(reply, answer)


def questions_of(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The questions about a picture and their answers. Raises RewardError when there are none, or of another form."""
    found = metadata.get(KEY)
    if not isinstance(found, list) or not found:
        raise RewardError(
            f"no questions in metadata {KEY!r} (keys: {sorted(metadata)}). Write pairs [question, answer]"
        )
    for pair in found:
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(t, str) and t.strip() for t in pair)
        ):
            raise RewardError(f"metadata {KEY!r} holds {pair!r}, which is no pair [question, answer] of texts")
    return [(question, answer) for question, answer in found]


def probability(reply: JudgeReply, answer: str) -> float:
    """How likely a judge answers right, in [0, 1]; 0 or 1 when it only says its answer."""
    spellings = spellings_of(answer)
    if reply.first is None:
        words = reply.text.split()
        return float(bool(words) and plain(words[0]) in spellings)
    return min(1.0, sum(mass for token, mass in reply.first.items() if begins(plain(token), spellings)))


def spellings_of(answer: str) -> set[str]:
    """The ways to write an answer: the word, and for a number the numeral, or the other way round."""
    word = plain(answer)
    return {word, NUMERALS.get(word, word), *(name for name, digits in NUMERALS.items() if digits == word)}


def plain(token: str) -> str:
    """A token without what does not count: case, blanks, punctuation."""
    return "".join(letter for letter in token.lower() if letter.isalnum())


def begins(token: str, spellings: set[str]) -> bool:
    """Whether a token is one of the spellings, or enough of its beginning."""
    return token in spellings or (len(token) >= SHORTEST and any(word.startswith(token) for word in spellings))


def geometric_mean(values: list[float]) -> float:
    """(prod v)^(1/n) of numbers in [0, 1]."""
    if min(values) == 0.0:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))
