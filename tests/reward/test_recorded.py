"""The reward of a recorded picture is what was recorded of it; a drawn one is scored by somebody else, or refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from unirl.config.errors import ConfigError
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.reward.local.recorded import RecordedRewardScorer
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

ROLES = ("chosen", "rejected", "rejected", "chosen")


def request(*roles: str | None) -> RewardRequest:
    return RewardRequest(
        sample_ids=[f"p{i // 2}@0:{i % 2}" for i in range(len(roles))],
        images=torch.linspace(0.1, 0.9, len(roles))[:, None, None, None].expand(-1, 3, 4, 4),
        metadata=[{} if role is None else {"recorded": role} for role in roles],
    )


def test_the_chosen_image_gets_1_and_the_rejected_0_each_by_itself() -> None:
    answer = check_reward(RecordedRewardScorer(), request(*ROLES))
    assert answer.total.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert answer.components.keys() == {"preference"}


def test_generated_images_are_scored_by_their_own_scorer() -> None:
    drawn = request(None, None, None)
    scorer, brightness = RecordedRewardScorer(drawn=BrightnessRewardScorer()), BrightnessRewardScorer()
    answer, expected = check_reward(scorer, drawn), brightness.score(drawn)
    assert torch.equal(answer.total, expected.total) and answer.components.keys() == expected.components.keys()
    assert set(scorer.reads) == {"images", "metadata"} and RecordedRewardScorer().reads == ("metadata",)
    assert check_reward(scorer, request(*ROLES)).total.tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("roles", [(None, None), ("chosen", None), ("chosen", "best")])
def test_an_image_without_a_recorded_preference_is_refused_by_name(roles) -> None:
    with pytest.raises(ConfigError, match=r"'p0@0:[01]' is not a recorded image .*eval_steps=0, or set reward.backend"):
        RecordedRewardScorer().score(request(*roles))


def test_a_generated_image_among_recorded_ones_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'p0@0:1' is not a recorded image"):
        RecordedRewardScorer(drawn=BrightnessRewardScorer()).score(request("chosen", None))


def test_the_scorer_of_generated_images_is_offloaded_with_it() -> None:
    moved = []

    class Moving(BrightnessRewardScorer):
        def offload(self) -> None:
            moved.append("away")

        def onload(self) -> None:
            moved.append("back")

    scorer = RecordedRewardScorer(drawn=Moving())
    scorer.offload()
    scorer.onload()
    RecordedRewardScorer().offload()
    assert moved == ["away", "back"]


def test_the_server_of_the_other_scorer_is_checked_at_the_start_but_not_the_recorded_prompts() -> None:
    class Absent(BrightnessRewardScorer):
        def check_start(self) -> None:
            raise ConfigError("no server answers")

        def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
            raise ConfigError("no sample of this prompt could be scored")

    scorer = RecordedRewardScorer(drawn=Absent())
    with pytest.raises(ConfigError, match="no server answers"):
        scorer.check_start()
    scorer.check_prompt("a cat", {})
