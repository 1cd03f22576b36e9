"""The reward of episodes: what the environment gave, and no score for a row whose environment failed."""

import pytest
import torch

from unirl.config.errors import RewardError
from unirl.reward.local.episode_return import EpisodeReturnRewardScorer
from unirl.reward.scoring import checked_score, response_of
from unirl.types.primitives import Episodes, Texts
from unirl.types.reward import RewardRequest


def request(faults=("", "")) -> RewardRequest:
    episodes = Episodes(
        returns=torch.tensor([3.5, -1.0]),
        success=torch.tensor([0.0, 1.0]),
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
