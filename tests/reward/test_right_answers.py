"""What scorers of right answers say of each response: the answer that they read, and whether it is right."""

from __future__ import annotations

import pytest
import torch

from tests.tokens import token_stage, token_track
from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer, single
from unirl.reward.combine import WeightedRewards
from unirl.reward.failures import FailurePolicy
from unirl.reward.local.exact_match import ExactMatchRewardScorer
from unirl.reward.local.gsm8k_exact_match import GSM8KExactMatchRewardScorer, GSM8KExactMatchSpec
from unirl.reward.local.length import LengthRewardScorer
from unirl.reward.local.math_verify import MathVerifyRewardScorer
from unirl.reward.local.mc_exact_match import MCExactMatchRewardScorer
from unirl.reward.scoring import checked_score
from unirl.reward.service import RewardService, concat_scored, with_rewards
from unirl.types.reward import Answer, ResponseLength, RewardRequest, RewardResponse
from unirl.types.rollout_resp import RolloutResp


def request(texts: list[str], answer: str = "7") -> RewardRequest:
    return RewardRequest(
        sample_ids=[f"p@0:{i}" for i in range(len(texts))],
        texts=texts,
        lengths=[ResponseLength(4, 8)] * len(texts),
        metadata=[{"answer": answer} for _ in texts],
    )


@pytest.mark.parametrize(
    ("scorer", "texts", "answer", "said"),
    [
        (ExactMatchRewardScorer(), [" a  b ", "a c", ""], "a b", ["a b", "a c", ""]),
        (MCExactMatchRewardScorer(), ["The answer is B", "(c)", "none"], "B", ["B", "C", ""]),
        (GSM8KExactMatchRewardScorer(), ["#### $1,000.50", "#### 7.0", "7"], "1000.5", ["1000.5", "7", ""]),
    ],
)
def test_the_answer_that_was_read_has_one_spelling(scorer, texts, answer, said) -> None:
    result = scorer.score(request(texts, answer)).answers
    assert result == [Answer(i == 0, text) for i, text in enumerate(said)]


def test_equal_numbers_are_one_answer_in_any_spelling() -> None:
    texts = ["#### 1,000", "#### 1000.0", "#### $1000.00"]
    assert {answer.text for answer in GSM8KExactMatchRewardScorer().score(request(texts)).answers} == {"1000"}


def test_math_returns_the_answer_without_white_space() -> None:
    result = MathVerifyRewardScorer().score(request([r"\boxed{ 3 + x }", "It is 7", "no idea"])).answers
    assert [(answer.right, answer.text) for answer in result] == [(False, "3+x"), (True, "7"), (False, "")]


def test_a_score_for_the_right_form_is_not_a_right_answer() -> None:
    scorer = GSM8KExactMatchRewardScorer(config=GSM8KExactMatchSpec(format_score=0.1))
    answer = scorer.score(request(["#### 8", "#### 7"]))
    assert answer.total.tolist() == pytest.approx([0.1, 1.0])
    assert [one.right for one in answer.answers] == [False, True]


class Blind(RewardScorer):
    """Scores texts and reads no answers."""

    reads = ("texts",)

    def score(self, request: RewardRequest) -> RewardResponse:
        return single("blind", torch.zeros(len(request)))


@pytest.mark.parametrize("weights", [{"blind": 1.0, "match": 0.5}, {"blind": 1.0, "match": 0.0}])
def test_answers_are_those_of_the_first_scorer_that_returns_any(weights) -> None:
    scorers = {"blind": Blind(), "match": ExactMatchRewardScorer()}
    combined = WeightedRewards(scorers=scorers, weights=weights)
    assert [answer.right for answer in checked_score(combined, request(["7", "8"]), "r").answers] == [True, False]


def test_a_length_reward_keeps_the_answers_and_other_scorers_have_none() -> None:
    shaped = LengthRewardScorer(scorer=ExactMatchRewardScorer())
    assert [answer.text for answer in checked_score(shaped, request(["7", "8"]), "r").answers] == ["7", "8"]
    assert checked_score(Blind(), request(["7"]), "r").answers is None


def test_a_wrong_number_of_answers_is_refused() -> None:
    class Short(Blind):
        def score(self, request: RewardRequest) -> RewardResponse:
            return RewardResponse(total=torch.zeros(2), components={"a": torch.zeros(2)}, answers=[Answer(True)])

    with pytest.raises(RewardError, match="1 answers for 2 samples"):
        checked_score(Short(), request(["7", "8"]), "r")


def test_rows_that_fail_have_no_answer_and_the_others_keep_theirs() -> None:
    class Picky(ExactMatchRewardScorer):
        def judge(self, text, answer):
            if text == "bad":
                raise RuntimeError("bad text")
            return super().judge(text, answer)

    policy = FailurePolicy(retries=1, max_dropped_fraction=0.5)
    result = policy.score(Picky(), request(["7", "bad", "8", "7"]), "picky")
    assert result.answers == [Answer(True, "7"), None, Answer(False, "8"), Answer(True, "7")]


def test_answers_reach_the_track_and_survive_parts_that_have_none() -> None:
    track = token_track(token_stage(), prompts=1, siblings=2).replace(rewards=None)
    scored = checked_score(ExactMatchRewardScorer(), request(["7", "8"]), "r")
    lost = RewardResponse(total=torch.full((2,), torch.nan), components={})
    parts = [RolloutResp({"text": with_rewards(track, answer, 0.0)}) for answer in (scored, lost)]
    assert concat_scored(parts).tracks["text"].answers == [Answer(True, "7"), Answer(False, "8"), None, None]
    assert concat_scored(parts[1:]).tracks["text"].answers is None
    assert RewardService(backend=ExactMatchRewardScorer()).probe(request(["7", "8"])).answers is not None
