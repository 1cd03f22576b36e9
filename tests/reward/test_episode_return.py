"""The reward of episodes: what the environment gave, and no score for a row whose environment failed."""

import math

import pytest
import torch

from unirl.config.errors import RewardError
from unirl.reward.combine import WeightedRewards
from unirl.reward.local.episode_return import EpisodeReturnRewardScorer
from unirl.reward.scoring import checked_score, response_of
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import Episodes, Texts
from unirl.types.reward import RewardRequest


def request(faults=("", ""), success=(0.0, 1.0)) -> RewardRequest:
    episodes = Episodes(
        returns=torch.tensor([3.5, -1.0]),
        success=torch.tensor(success),
        lengths=torch.tensor([10.0, 4.0]),
        faults=list(faults),
    )
    return RewardRequest(sample_ids=["a", "b"], episodes=episodes)


def test_the_reward_is_the_return_or_the_success() -> None:
    by_return = checked_score(EpisodeReturnRewardScorer(), request(), "return")
    by_success = checked_score(EpisodeReturnRewardScorer(reward="success"), request(), "success")
    assert by_return.total.tolist() == [3.5, -1.0] and by_success.total.tolist() == [0.0, 1.0]
    assert {name: column.tolist() for name, column in by_success.components.items()} == {
        "return": [3.5, -1.0],
        "success": [0.0, 1.0],
    }
    assert by_return.components.keys() == {"return"} and by_return.logged_rewards["success"].tolist() == [0.0, 1.0]


def test_success_that_no_environment_reports_is_no_score() -> None:
    scorer = EpisodeReturnRewardScorer()
    nowhere = checked_score(scorer, request(success=(math.nan, math.nan)), "return")
    assert nowhere.total.tolist() == [3.5, -1.0] and not nowhere.logged_rewards
    half = checked_score(scorer, request(success=(math.nan, 1.0)), "return")
    assert half.logged_rewards["success"].isnan().tolist() == [True, False] and not half.failures
    failed = response_of(scorer, request(("", "it hung"), success=(1.0, 0.0)), "return")
    assert failed.logged_rewards["success"].isnan().tolist() == [False, True], "a failed episode says nothing"
    with pytest.raises(RewardError, match=r"sample 'a' reports no success, which is the reward\. Set .*reward=return"):
        checked_score(EpisodeReturnRewardScorer(reward="success"), request(success=(math.nan, 1.0)), "success")


def test_success_beside_other_rewards_keeps_its_name() -> None:
    both = WeightedRewards(
        scorers={"game": EpisodeReturnRewardScorer(), "goal": EpisodeReturnRewardScorer()},
        weights={"game": 1.0, "goal": 1.0},
    )
    response = checked_score(both, request(success=(math.nan, 1.0)), "both")
    assert response.components.keys() == {"game", "goal"}
    assert response.logged_rewards.keys() == {"game_success", "goal_success"}


@pytest.mark.parametrize(("success", "expected"), [((math.nan, math.nan), None), ((math.nan, 1.0), 1.0)])
def test_evaluations_and_training_have_the_mean_of_what_was_reported(success, expected) -> None:
    response = checked_score(EpisodeReturnRewardScorer(), request(success=success), "return")
    result = EvalResult(
        sample_ids=("a", "b"),
        group_ids=("a", "b"),
        prompts=("", ""),
        rewards=response.total,
        components=response.components,
        logged_rewards=response.logged_rewards,
        media=request().episodes.preview(),
        track="image",
    )
    assert result.metrics().get("eval/success_mean") == expected and result.metrics()["eval/return_mean"] == 1.25


def test_a_row_whose_environment_failed_has_no_reward_and_says_why() -> None:
    response = response_of(EpisodeReturnRewardScorer(), request(("", "it hung for 60 s")), "return")
    assert response.total[0] == 3.5 and response.failed_rows() == [1]
    assert response.failures[1][0].why == "the environment of sample 'b' failed: it hung for 60 s"
    with pytest.raises(RewardError, match="the environment of sample 'b' failed: it hung"):
        checked_score(EpisodeReturnRewardScorer(), request(("", "it hung for 60 s")), "return")


def test_people_see_the_numbers_of_episodes_without_pictures() -> None:
    preview = request().episodes.preview()
    assert isinstance(preview, Texts)
    assert preview.texts == ["return 3.5, 10 steps, success 0%", "return -1, 4 steps, success 100%"]
