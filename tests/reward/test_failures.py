"""A failed score is never zero: it is retried, then its group is dropped (up to a limit), else the run stops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reward.test_service import LEVELS, a_request, a_response, flat
from unirl.config.errors import ConfigError, RewardError, RewardUnreachableError
from unirl.reward.base import RewardScorer, single
from unirl.reward.combine import WeightedRewards
from unirl.reward.failures import DropBudget, FailurePolicy, drop_reasons
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.reward.service import RewardService, concat_scored
from unirl.types.reward import RewardRequest
from unirl.types.rollout_resp import RolloutResp

TOLERANT = FailurePolicy(max_dropped_fraction=0.6)
IDS = a_request().sample_ids  # g0:0 g0:1 g1:0 g1:1


class Failing(RewardScorer):
    """Brightness; raises when one of `poison` is among its rows, `times` times each, or always."""

    reads = ("images",)

    def __init__(self, *poison, times=10**6):
        self.left = dict.fromkeys(poison, times)
        self.asked = []

    def score(self, request):
        self.asked.append(list(request.sample_ids))
        for sample in request.sample_ids:
            if self.left.get(sample):
                self.left[sample] -= 1
                raise TimeoutError(f"no answer for {sample}")
        return single("brightness", request.images.mean(dim=(1, 2, 3)))


def scored(scorer, policy=TOLERANT):
    return RewardService(backend=scorer, on_failure=policy).score_and_attach(a_request(), a_response())


def test_a_failed_row_is_isolated_and_the_others_keep_their_scores():
    track = scored(Failing("g1:0")).tracks["image"]
    assert track.rewards.isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(track.rewards[[0, 1, 3]], torch.tensor(LEVELS)[[0, 1, 3]])
    assert [len(result) for result in track.failures] == [0, 0, 1, 0]
    assert track.failures[2][0].reward == "Failing" and "no answer for g1:0" in track.failures[2][0].why
    assert track.component_rewards["brightness"].isnan().tolist() == [False, False, True, False]


@given(st.sets(st.sampled_from(IDS), max_size=4))
def test_whichever_rows_fail_the_others_are_scored_as_if_alone(poison):
    track = scored(Failing(*poison)).tracks["image"]
    for sample, level, score in zip(IDS, LEVELS, track.rewards.tolist(), strict=True):
        assert (score != score) if sample in poison else score == pytest.approx(level)


def test_a_temporary_failure_is_retried_alone_and_changes_nothing():
    scorer = Failing("g0:1", times=3)  # the whole call, its half, and alone
    track = scored(scorer, FailurePolicy(retries=1)).tracks["image"]
    torch.testing.assert_close(track.rewards, torch.tensor(LEVELS))
    assert scorer.asked[-1] == ["g0:1"] and not any(track.failures)


def test_a_failure_after_all_retries_stops_the_step_if_nothing_may_be_dropped():
    with pytest.raises(RewardError, match=r"(?s)no answer for g0:1.*1 of 4 samples could not be scored"):
        scored(Failing("g0:1"), FailurePolicy(retries=2))


def test_an_unreachable_reward_stops_the_run_instead_of_dropping_samples():
    class Gone(RewardScorer):
        reads = ("images",)

        def score(self, request):
            raise RewardUnreachableError("no server at http://127.0.0.1:1")

    with pytest.raises(RewardError, match="no server") as caught:
        scored(Gone())
    assert caught.value.code == 6001


def test_an_error_in_the_recipe_stops_the_run_instead_of_dropping_samples():
    scorer = Failing()
    scorer.score = lambda request: scorer.asked.append(1) or (_ for _ in ()).throw(ConfigError("no such reward"))
    with pytest.raises(ConfigError, match="no such reward"):
        scored(scorer)
    assert scorer.asked == [1]


def test_responses_of_ranks_are_joined_even_if_all_rows_of_one_failed():
    service = RewardService(backend=Failing("g1:0", "g1:1"), on_failure=TOLERANT)
    req, resp = a_request(), a_response()
    parts = [service.score_and_attach(req.slice(a, b), resp.select(range(a, b))) for a, b in ((0, 2), (2, 4))]
    assert parts[1].tracks["image"].component_rewards == {}
    track = concat_scored(parts).tracks["image"]
    assert track.component_rewards["brightness"].isnan().tolist() == [False, False, True, True]


def test_a_logged_only_reward_enters_no_advantage_and_may_fail():
    both = WeightedRewards(
        scorers={"bright": BrightnessRewardScorer(), "judge": Failing("g1:0")}, weights={"bright": 1.0, "judge": 0.0}
    )
    track = scored(both, FailurePolicy()).tracks["image"]
    torch.testing.assert_close(track.rewards, torch.tensor(LEVELS))
    assert list(track.component_rewards) == ["bright"]
    assert track.logged_rewards["judge"].isnan().all()  # asked once: it is not worth finding the row
    assert {result[0].reward for result in track.failures} == {"judge"}


def test_a_row_without_a_weighted_reward_fails_whatever_is_logged_only():
    both = WeightedRewards(
        scorers={"logged": Failing("g0:0"), "bright": Failing("g1:0")}, weights={"logged": 0.0, "bright": 1.0}
    )
    track = scored(both).tracks["image"]
    assert track.rewards.isnan().tolist() == [False, False, True, False]
    assert track.failures[2][0].reward == "WeightedRewards" and "'bright' failed" in track.failures[2][0].why


# The budget


def lost(*samples):
    return scored(Failing(*samples))


def test_a_whole_group_gets_weight_0_and_the_ledger_has_the_reason():
    resp = DropBudget(TOLERANT).admit(lost("g1:0"))
    track = resp.tracks["image"]
    assert track.weight.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert drop_reasons(track) == {"Failing": 1, "sibling": 1}


def test_beyond_the_budget_the_run_stops_with_counts_and_the_first_sample():
    budget = DropBudget(replace(TOLERANT, max_dropped_fraction=0.4))
    with pytest.raises(
        RewardError, match=r"2 of the 4 samples of the last 1 steps.*allows 0\.4.*1 by Failing, 1 by sibling.*'g1:0'"
    ) as caught:
        budget.admit(lost("g1:0"))
    assert caught.value.code == 6002


def test_the_budget_counts_over_a_window_of_steps():
    budget = DropBudget(FailurePolicy(max_dropped_fraction=0.25, window=2))
    for _ in range(3):
        budget.admit(lost())
    budget.admit(lost("g0:0"))  # 2 of 8
    budget.admit(lost())
    budget.admit(lost("g0:0"))
    with pytest.raises(RewardError, match="4 of the 8 samples of the last 2 steps"):
        budget.admit(lost("g0:0"))


def test_a_step_without_any_score_stops_the_run():
    with pytest.raises(RewardError, match="4 of the 4 samples"):
        DropBudget(replace(TOLERANT, max_dropped_fraction=0.99)).admit(lost(*IDS))


def test_the_budget_continues_after_a_checkpoint():
    first, second = (DropBudget(FailurePolicy(max_dropped_fraction=0.25, window=2)) for _ in range(2))
    first.admit(lost())
    first.admit(lost("g0:0"))
    second.load_state_dict(first.state_dict())
    with pytest.raises(RewardError, match="4 of the 8"):
        second.admit(lost("g0:0"))


def test_a_failed_leaf_gives_weight_0_to_its_root_group():
    req, parent = a_request(), a_response().tracks["image"]
    ids = [f"{sample}/{j}" for sample in req.sample_ids for j in range(2)]
    leaf = parent.select([0, 0, 1, 1, 2, 2, 3, 3]).replace(
        sample_ids=ids,
        group_ids=[sample for sample in req.sample_ids for _ in range(2)],
        parent_track="text",
        parent_ids=[sample for sample in req.sample_ids for _ in range(2)],
    )
    resp = RolloutResp({"text": parent, "image": leaf})
    resp = RewardService(backend=Failing("g1:0/1"), on_failure=TOLERANT).score_and_attach(req, resp)
    resp = DropBudget(TOLERANT).admit(resp)
    assert resp.tracks["image"].weight.tolist() == [1.0] * 4 + [0.0] * 4
    assert resp.tracks["text"].weight.tolist() == [1.0] * 2 + [0.0] * 2


@pytest.mark.parametrize(
    ("key", "value"), [("retries", -1), ("max_dropped_fraction", 1.0), ("max_dropped_fraction", -0.1), ("window", 0)]
)
def test_a_policy_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"on_failure\.{key} must .*got {value}"):
        FailurePolicy(**{key: value})


def test_rows_of_a_request_are_rows_of_all_its_columns():
    request = RewardRequest(sample_ids=list("abc"), images=flat([0.0, 0.5, 1.0]).pixels, metadata=[{}, {"x": 1}, {}])
    part = request.select([2, 1])
    assert part.sample_ids == ["c", "b"] and part.metadata == [{}, {"x": 1}] and part.prompts is None
    assert part.images[:, 0, 0, 0].tolist() == [1.0, 0.5]
