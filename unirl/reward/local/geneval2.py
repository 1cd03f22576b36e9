"""GenEval 2: a judge answers one question about each fact of a prompt (Soft-TIFA). arXiv:2512.16853.

p_i = P(the judge begins its answer to question i with the right word);  am = mean p_i;  gm = (prod p_i)^(1/n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from unirl.config.errors import RewardError
from unirl.reward.judges.endpoint import JudgeReply, JudgeSpec
from unirl.reward.judges.judge import JudgeScorer

KEY = "vqa_list"
ONE_WORD = "{question} Answer in one word."
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMERALS = {word: str(number) for number, word in enumerate(NUMBERS)}
MAX_WORD = 16
"""Largest number of tokens of an answer in one word."""
SHORTEST = 3
"""Number of letters that the first token of a longer word must have to count as its beginning."""


@dataclass(frozen=True, kw_only=True)
class GenEval2Spec(JudgeSpec):
    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    aggregation: Literal["gm", "am"] = "gm"
    """gm: geometric mean, which is 0 if one fact has probability 0; am: arithmetic mean."""
    soft: bool = True
    """Use probabilities, which requires log-probs from the endpoint. False: 1 if the judge's word is right, else 0."""


class GenEval2RewardScorer(JudgeScorer):
    """Soft-TIFA in [0, 1]: the mean over the prompt's questions of the probability of the right answer.

    Metadata `vqa_list` holds pairs [question, answer in one word]; a sample without any has no score. Every question is
    one request. The probability is the sum over the first tokens that are the answer, in upper or lower case, as a word
    or a numeral, or at least three letters of its beginning. Only the 20 likeliest tokens are known, so the sum may be
    too small by the probability of the others.
    """

    names = ("geneval2", "geneval2_gm", "geneval2_am")
    reads = ("images", "metadata")
    config: GenEval2Spec

    def __init__(self, *, config: GenEval2Spec) -> None:
        super().__init__(config)

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        questions_of(metadata)

    def score_image(self, image: bytes, prompt: str, metadata: Mapping[str, object]) -> Mapping[str, float]:
        max_tokens = 1 if self.config.soft else MAX_WORD
        probabilities = [
            probability(self.judge.ask(image, ONE_WORD.format(question=question), max_tokens, self.config.soft), answer)
            for question, answer in questions_of(metadata)
        ]
        means = {
            "geneval2_gm": geometric_mean(probabilities),
            "geneval2_am": sum(probabilities) / len(probabilities),
        }
        return {"geneval2": means[f"geneval2_{self.config.aggregation}"], **means}


def questions_of(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns the questions about an image and their answers. Raises RewardError when they are missing or malformed."""
    pairs = metadata.get(KEY)
    if not isinstance(pairs, list) or not pairs:
        raise RewardError(
            f"no questions in metadata {KEY!r} (keys: {sorted(metadata)}). Write pairs [question, answer]"
        )
    for pair in pairs:
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(t, str) and t.strip() for t in pair)
        ):
            raise RewardError(f"metadata {KEY!r} holds {pair!r}, which is not a pair [question, answer] of texts")
    return [(question, answer) for question, answer in pairs]


def probability(reply: JudgeReply, answer: str) -> float:
    """Returns the probability in [0, 1] of the right answer; 0 or 1 for a reply without probabilities."""
    word = plain(answer)
    spellings = {word, NUMERALS.get(word, word), *(name for name, digits in NUMERALS.items() if digits == word)}
    if reply.first is None:
        words = reply.text.split()
        return float(bool(words) and plain(words[0]) in spellings)
    return min(1.0, sum(mass for token, mass in reply.first.items() if begins(plain(token), spellings)))


def plain(token: str) -> str:
    """Returns a token in lower case without white space and punctuation."""
    return "".join(letter for letter in token.lower() if letter.isalnum())


def begins(token: str, spellings: set[str]) -> bool:
    """Returns True if a token is one of the spellings, or at least three letters of the beginning of one."""
    return token in spellings or (len(token) >= SHORTEST and any(word.startswith(token) for word in spellings))


def geometric_mean(values: list[float]) -> float:
    """Returns (prod v)^(1/n) of numbers in [0, 1]."""
    if min(values) == 0.0:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))
