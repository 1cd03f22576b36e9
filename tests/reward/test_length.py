"""A response's length shapes its reward as DAPO says, and only the reward."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tokens import TokenSampling, token_stage, token_track
from unirl.config.errors import RewardError
from unirl.reward.local.exact_match import ExactMatchRewardScorer
from unirl.reward.local.length import (
    LengthRewardScorer,
    LengthSpec,
    TextLengthRewardScorer,
    TextLengthSpec,
    overlong_penalty,
)
from unirl.reward.scoring import checked_score
from unirl.reward.service import RewardService
from unirl.testing.reward import check_reward
from unirl.types.primitives import Texts
from unirl.types.reward import ResponseLength, RewardRequest
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ARSamplingParams


def request(texts, tokens, limit=100):
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(len(texts))],
        texts=texts,
        lengths=[ResponseLength(count, limit) for count in tokens],
        metadata=[{"answer": "yes"}] * len(texts),
    )


def shaped(**values):
    return LengthRewardScorer(scorer=ExactMatchRewardScorer(), config=LengthSpec(**values))


ROWS = request(["yes", "yes", "yes", "no", "no"], [10, 90, 100, 100, 95])


@pytest.mark.parametrize(
    ("values", "totals"),
    [
        ({"truncated": "keep"}, [1, 1, 1, 0, 0]),
        ({"truncated": "zero"}, [1, 1, 0, 0, 0]),
        ({"truncated": "soft", "buffer": 20}, [1, 0.5, 0, -1, -0.75]),
        ({"truncated": "soft", "buffer": 20, "factor": 2.0}, [1, 0, -1, -2, -1.5]),
    ],
)
def test_long_responses_are_penalised_and_components_are_unchanged(values, totals):
    answer = check_reward(shaped(**values), ROWS)
    assert answer.total.tolist() == pytest.approx(totals)
    assert answer.components["exact_match"].tolist() == [1, 1, 1, 0, 0]
    assert answer.components["truncated"].tolist() == [0, 0, 1, 1, 0]
    torch.testing.assert_close(answer.total - answer.components["exact_match"], answer.components["length_penalty"])


def test_length_alone_is_a_reward_from_0_down_to_minus_1():
    scorer = TextLengthRewardScorer(config=TextLengthSpec(max_tokens=80, buffer=20))
    answer = check_reward(scorer, ROWS)
    assert answer.total.tolist() == pytest.approx([0, -0.5, -1, -1, -0.75])
    assert list(answer.components) == ["text_length"]
    with pytest.raises(ValueError, match="buffer must be >= 1 token, got 0"):
        TextLengthSpec(buffer=0)
    with pytest.raises(ValueError, match="max_tokens must be >= 0, got -1"):
        TextLengthSpec(max_tokens=-1)


def test_the_overlong_penalty_is_that_of_dapo():
    lengths, limits = torch.tensor([0, 16383, 16384, 18432, 20480, 30000]), torch.full((6,), 20480)
    assert overlong_penalty(lengths, limits, 4096).tolist() == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths[3:4], limits[:1], 4096, factor=3.0).tolist() == [-1.5]
    assert overlong_penalty(torch.tensor([15, 15]), torch.tensor([20, 40]), 10).tolist() == [-0.5, 0.0]


def test_a_buffer_beyond_the_longest_response_is_refused():
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), torch.tensor([10]), 11)
    with pytest.raises(RewardError, match="buffer"):
        checked_score(shaped(truncated="soft", buffer=101), ROWS, "length")


@pytest.mark.parametrize("values", [{"buffer": 0}, {"factor": -1.0}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=r"LengthSpec\."):
        LengthSpec(**values)


def test_a_truncated_response_that_cannot_be_scored_is_not_zero():
    rows = dataclasses.replace(ROWS, metadata=[{}] * 5)
    answer = shaped(truncated="zero").score(rows)
    assert answer.failed_rows() == list(range(5)) and "no right answer" in answer.failures[2][0].why
    with pytest.raises(RewardError, match="no right answer"):
        shaped().check_prompt("question", {})


def test_the_service_gives_the_tokens_of_each_text_and_the_limit_of_its_sampling():
    track = token_track(token_stage(), params=TokenSampling(max_new_tokens=4))
    lengths = track.segment.lengths
    assert lengths.min() < 4 and (lengths == 4).any(), "a case with both"
    rows = len(track)
    track = track.replace(rewards=None, advantages=None, decoded=Texts(texts=["yes"] * rows))
    req = RolloutReq(
        sample_ids=track.sample_ids,
        group_ids=track.group_ids,
        primitives={"text": Texts(texts=["?"] * rows)},
        metadata=[{"answer": "yes"}] * rows,
        tracks={"text": TrackSpec(sampling=ARSamplingParams(max_new_tokens=4))},
        purpose="r",
        step=0,
    )
    service = RewardService(backend=shaped(truncated="zero"))
    scored = service.score_and_attach(req, RolloutResp({"text": track})).tracks["text"]
    assert scored.rewards.tolist() == (lengths < 4).float().tolist()
