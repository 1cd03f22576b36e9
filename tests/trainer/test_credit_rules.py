"""Every rule of credit, held to a tree worked out by hand: thoughts, captions of each, images of each."""

from __future__ import annotations

import random

import pytest
import torch

from tests.trainer.test_credit import Credit, track
from unirl.algorithms.shared.advantages import BestOfGroup, GroupAdvantage
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.tracker import Tracker
from unirl.types.credit import CREDIT_RULES, CreditName
from unirl.types.rollout_resp import RolloutResp

PLAIN = GroupAdvantage(std="none", clip=None)
ONE_PROMPT = "p@0"

# id: (parent, weight). The thought t2 and the caption c were dropped; the images of c were not.
THOUGHTS = {"t0": 1.0, "t1": 1.0, "t2": 0.0}
CAPTIONS = {"a": ("t0", 1.0), "b": ("t0", 1.0), "c": ("t0", 0.0), "d": ("t1", 1.0), "e": ("t1", 1.0), "f": ("t2", 0.0)}
# id: (parent, reward, weight)
IMAGES = {
    "a0": ("a", 1.0, 1.0),
    "a1": ("a", 3.0, 1.0),
    "a2": ("a", 9.0, 0.0),
    "b0": ("b", 6.0, 1.0),
    "b1": ("b", 2.0, 1.0),
    "b2": ("b", 1.0, 1.0),
    "c0": ("c", 50.0, 1.0),
    "c1": ("c", 60.0, 1.0),
    "d0": ("d", 4.0, 1.0),
    "d1": ("d", 4.0, 1.0),
    "e0": ("e", float("nan"), 0.0),
    "e1": ("e", 5.0, 1.0),
    "f0": ("f", 7.0, 0.0),
}
REWARDS = {
    # a = {1, 3}, b = {6, 2, 1}, d = {4, 4}, e = {5}; t0 = {a, b}, t1 = {d, e}
    "mean": {"a": 2.0, "b": 3.0, "d": 4.0, "e": 5.0, "t0": 2.5, "t1": 4.5},
    "max": {"a": 3.0, "b": 6.0, "d": 4.0, "e": 5.0, "t0": 6.0, "t1": 5.0},
    "sum": {"a": 4.0, "b": 9.0, "d": 8.0, "e": 5.0, "t0": 13.0, "t1": 13.0},
    "best_of_n": {"a": 3.0, "b": 6.0, "d": 4.0, "e": 5.0, "t0": 6.0, "t1": 5.0},
    "leave_one_out": {"a": 2.0, "b": 3.0, "d": 4.0, "e": 5.0, "t0": 2.5, "t1": 4.5},
}
IMAGE_LESS_MEAN = {
    "a0": -1.0,
    "a1": 1.0,
    "b0": 3.0,
    "b1": -1.0,
    "b2": -2.0,
    "c0": -5.0,
    "c1": 5.0,
    "d0": 0.0,
    "d1": 0.0,
}
IMAGE_LESS_MEAN |= {"e1": 0.0}  # an only child
ADVANTAGES = {
    "mean": IMAGE_LESS_MEAN | {"a": -0.5, "b": 0.5, "d": -0.5, "e": 0.5, "t0": -1.0, "t1": 1.0},
    "max": IMAGE_LESS_MEAN | {"a": -1.5, "b": 1.5, "d": -0.5, "e": 0.5, "t0": 0.5, "t1": -0.5},
    "sum": IMAGE_LESS_MEAN | {"a": -2.5, "b": 2.5, "d": 1.5, "e": -1.5, "t0": 0.0, "t1": 0.0},
    # The best of each parent, compared with the mean of all. Of the equal images of d, the first is the best.
    "best_of_n": {"a1": 1.0, "b0": 3.0, "c1": 5.0, "d0": 0.0, "e1": 0.0, "b": 1.5, "e": 0.5, "t0": 0.5, "t1": -0.5},
    # Compared with the mean of the others: b0 with (2 + 1) / 2, b1 with (6 + 1) / 2, b2 with (6 + 2) / 2.
    "leave_one_out": {"a0": -2.0, "a1": 2.0, "b0": 4.5, "b1": -1.5, "b2": -3.0, "c0": -10.0, "c1": 10.0}
    | {"d0": 0.0, "d1": 0.0, "e1": 0.0, "a": -1.0, "b": 1.0, "d": -1.0, "e": 1.0, "t0": -2.0, "t1": 2.0},
}
"""By id, the advantages of the rows that are trained, with `PLAIN`. All others have weight 0."""


@pytest.fixture
def tracker(tmp_path):
    run = RunDirectory(tmp_path, RunIdentity(project="demo", recipe="unified"))
    with Tracker(run, tracks=("think", "recaption", "image")) as tracker:
        yield tracker


def chain(seed: int = 0) -> RolloutResp:
    """The tree, with the rows of each track in some order."""
    shuffle = random.Random(seed).sample
    thoughts, captions, images = (shuffle(list(level), len(level)) for level in (THOUGHTS, CAPTIONS, IMAGES))
    images.sort(key=lambda i: i == "d1")  # behind d0, whose reward it has: of equal rows, the first is the best
    rewards = torch.tensor([IMAGES[i][1] for i in images])
    of_captions = [CAPTIONS[i][0] for i in captions]
    of_images = [IMAGES[i][0] for i in images]
    think = track(thoughts, [ONE_PROMPT] * len(thoughts))
    recaption = track(captions, of_captions, parent_track="think", parent_ids=of_captions)
    image = track(images, of_images, parent_track="recaption", parent_ids=of_images, rewards=rewards)
    return RolloutResp(
        {
            "image": image.replace(
                weight=torch.tensor([IMAGES[i][2] for i in images]), component_rewards={"minus": -rewards}
            ),
            "recaption": recaption.replace(weight=torch.tensor([CAPTIONS[i][1] for i in captions])),
            "think": think.replace(weight=torch.tensor([THOUGHTS[i] for i in thoughts])),
        }
    )


class Chain(Credit):
    """The credit of the loop, by a rule, as `unirl.trainer.assemble` sets it up."""

    def __init__(self, tracker, rule: CreditName, estimator=PLAIN) -> None:
        super().__init__(tracker, estimator.leaving_one_out() if CREDIT_RULES[rule].leave_one_out else estimator)
        self.credit_rule = rule


def rewards_of(resp: RolloutResp) -> dict[str, float]:
    """Id to reward, of the rows of weight > 0 above the images."""
    tracks = [resp.tracks[name] for name in ("think", "recaption")]
    return {
        sample: reward
        for each in tracks
        for sample, reward, weight in zip(each.sample_ids, each.rewards.tolist(), each.weight.tolist(), strict=True)
        if weight > 0
    }


def advantages_of(resp: RolloutResp) -> dict[str, float]:
    """Id to advantage, of the rows that are trained."""
    return {
        sample: advantage
        for each in resp.tracks.values()
        for sample, advantage, weight in zip(
            each.sample_ids, each.advantages.tolist(), each.weight.tolist(), strict=True
        )
        if weight > 0
    }


@pytest.mark.parametrize("rule", REWARDS)
@pytest.mark.parametrize("seed", range(3))
def test_rewards_climb_a_chain_of_three_tracks_as_by_hand(rule, seed) -> None:
    assert rewards_of(chain(seed).propagate_rewards(rule)) == REWARDS[rule]


@pytest.mark.parametrize("rule", ADVANTAGES)
@pytest.mark.parametrize("seed", range(3))
def test_the_rows_that_are_trained_and_their_advantages_are_those_by_hand(rule, seed, tracker) -> None:
    assert advantages_of(Chain(tracker, rule).credit(0, chain(seed))) == pytest.approx(ADVANTAGES[rule])


def test_every_rule_of_a_recipe_is_held_to_the_tree() -> None:
    assert set(REWARDS) == set(ADVANTAGES) == set(CREDIT_RULES) - {"last"}


def test_leaving_one_out_is_n_over_n_minus_one_times_the_centred_reward(tracker) -> None:
    """The identity of Ahmadian et al. 2024 (arXiv:2402.14740): r - mean of the others = n / (n - 1) (r - mean)."""
    left_out = advantages_of(Chain(tracker, "leave_one_out").credit(0, chain()))
    centred = advantages_of(Chain(tracker, "mean").credit(0, chain()))
    siblings = {"b0": 3, "b1": 3, "b2": 3, "a0": 2, "a1": 2, "a": 2, "b": 2, "t0": 2, "t1": 2}
    for sample, count in siblings.items():
        assert left_out[sample] == pytest.approx(count / (count - 1) * centred[sample])


def test_a_parent_has_the_components_of_its_best_child_and_not_the_best_of_each() -> None:
    """The component is minus the reward. With `max`, its best value is that of the worst image."""
    best = chain().propagate_rewards("best_of_n").tracks["recaption"]
    of_best = dict(zip(best.sample_ids, best.component_rewards["minus"].tolist(), strict=True))
    largest = chain().propagate_rewards("max").tracks["recaption"]
    of_all = dict(zip(largest.sample_ids, largest.component_rewards["minus"].tolist(), strict=True))
    assert (of_best["b"], of_all["b"]) == (-6.0, -1.0)


def test_best_of_n_logs_the_share_of_rows_that_are_trained(tracker) -> None:
    Chain(tracker, "best_of_n").credit(0, chain())
    metrics = tracker.log_step(1)
    assert metrics["image/rollout/selected_ratio"] == 5 / 10
    assert metrics["recaption/rollout/selected_ratio"] == 2 / 4
    assert metrics["think/rollout/selected_ratio"] == 1.0
    assert metrics["recaption/rollout/reward_mean"] == pytest.approx((3 + 6 + 4 + 5) / 4)  # of all, trained or not


def test_with_best_of_group_the_best_child_has_advantage_one(tracker) -> None:
    """RAFT: a log-likelihood on the best sample alone. Groups of equal rewards, and only children, are left out."""
    resp = Chain(tracker, "best_of_n", BestOfGroup()).credit(0, chain())
    assert advantages_of(resp) == {"a1": 1.0, "b0": 1.0, "c1": 1.0, "b": 1.0, "e": 1.0, "t0": 1.0}


def with_own(resp: RolloutResp, name: str, own: dict[str, float], part: str, final: bool = False) -> RolloutResp:
    """The tree with rewards of its own on a track, as the reward service attaches them."""
    track = resp.tracks[name]
    rewards = torch.tensor([own[i] for i in track.sample_ids])
    scored = track.replace(rewards=rewards, component_rewards={part: rewards}, rewards_are_final=final)
    return resp.with_track(name, scored)


# Own rewards of captions and thoughts. Dropped rows have some, too, or could not be scored.
OF_CAPTIONS = {"a": 1.0, "b": -2.5, "c": 100.0, "d": 0.5, "e": 0.0, "f": float("nan")}
OF_THOUGHTS = {"t0": 2.0, "t1": -0.5, "t2": float("nan")}
SUMS = {
    # captions: the rule over the images + the own reward; thoughts: the rule over these sums + the own reward
    "mean": {"a": 3.0, "b": 0.5, "d": 4.5, "e": 5.0, "t0": 3.75, "t1": 4.25},
    "max": {"a": 4.0, "b": 3.5, "d": 4.5, "e": 5.0, "t0": 6.0, "t1": 4.5},
    "sum": {"a": 5.0, "b": 6.5, "d": 8.5, "e": 5.0, "t0": 13.5, "t1": 13.0},
    "best_of_n": {"a": 4.0, "b": 3.5, "d": 4.5, "e": 5.0, "t0": 6.0, "t1": 4.5},
    "leave_one_out": {"a": 3.0, "b": 0.5, "d": 4.5, "e": 5.0, "t0": 3.75, "t1": 4.25},
}
ADVANTAGES_OF_SUMS = {
    "mean": IMAGE_LESS_MEAN | {"a": 1.25, "b": -1.25, "d": -0.25, "e": 0.25, "t0": -0.25, "t1": 0.25},
    "max": IMAGE_LESS_MEAN | {"a": 0.25, "b": -0.25, "d": -0.25, "e": 0.25, "t0": 0.75, "t1": -0.75},
    "sum": IMAGE_LESS_MEAN | {"a": -0.75, "b": 0.75, "d": 1.75, "e": -1.75, "t0": 0.25, "t1": -0.25},
    # The best caption of t0 is a, and without its own reward it is b.
    "best_of_n": {"a1": 1.0, "b0": 3.0, "c1": 5.0, "d0": 0.0, "e1": 0.0}
    | {"a": 0.25, "e": 0.25, "t0": 0.75, "t1": -0.75},
    "leave_one_out": {i: ADVANTAGES["leave_one_out"][i] for i in ADVANTAGES["leave_one_out"] if i in IMAGES}
    | {"a": 2.5, "b": -2.5, "d": -0.5, "e": 0.5, "t0": -0.5, "t1": 0.5},
}


def scored_chain(seed: int = 0) -> RolloutResp:
    """The tree, with rewards of their own for captions and thoughts."""
    return with_own(with_own(chain(seed), "recaption", OF_CAPTIONS, "style"), "think", OF_THOUGHTS, "plan")


@pytest.mark.parametrize("rule", SUMS)
@pytest.mark.parametrize("seed", range(3))
def test_own_rewards_of_the_middle_and_the_root_are_added_as_by_hand(rule, seed, tracker) -> None:
    resp = scored_chain(seed)
    assert rewards_of(resp.propagate_rewards(rule)) == SUMS[rule]
    assert advantages_of(Chain(tracker, rule).credit(0, resp)) == pytest.approx(ADVANTAGES_OF_SUMS[rule])


@pytest.mark.parametrize("rule", SUMS)
def test_own_rewards_of_the_root_alone_change_nothing_below_it(rule, tracker) -> None:
    resp, plain = with_own(chain(), "think", OF_THOUGHTS, "plan"), REWARDS[rule]
    assert rewards_of(resp.propagate_rewards(rule)) == plain | {"t0": plain["t0"] + 2.0, "t1": plain["t1"] - 0.5}
    found, expected = advantages_of(Chain(tracker, rule).credit(0, resp)), ADVANTAGES[rule]
    roots = {"t0", "t1"}
    assert {i: found[i] for i in found if i not in roots} == pytest.approx(
        {i: expected[i] for i in expected if i not in roots}
    )


def test_a_track_without_credit_passes_up_its_own_rewards_alone() -> None:
    """t0 = {1, -2.5} and t1 = {0.5, 0}, whatever their images are; c, which was dropped, has 100."""
    resp = with_own(with_own(chain(), "recaption", OF_CAPTIONS, "style", final=True), "think", OF_THOUGHTS, "plan")
    assert rewards_of(resp.propagate_rewards("mean")) == {
        **{i: OF_CAPTIONS[i] for i in "abde"},
        "t0": -0.75 + 2.0,
        "t1": 0.25 - 0.5,
    }
    assert set(resp.propagate_rewards("mean").tracks["think"].component_rewards) == {"style", "plan"}


@pytest.mark.parametrize(
    ("rule", "of_t0"),
    [
        ("mean", {"plan": 2.0, "style": -0.75, "minus": -2.5}),
        ("sum", {"plan": 2.0, "style": -1.5, "minus": -13.0}),
        ("best_of_n", {"plan": 2.0, "style": 1.0, "minus": -3.0}),  # a and its image of reward 3
    ],
)
def test_components_of_a_parent_are_its_own_and_those_of_its_children(rule, of_t0) -> None:
    think = scored_chain().propagate_rewards(rule).tracks["think"]
    row = think.sample_ids.index("t0")
    assert {part: float(scores[row]) for part, scores in think.component_rewards.items()} == of_t0


def test_a_component_is_reported_for_the_run_where_it_was_scored(tracker) -> None:
    """Captions have the styles 1, -2.5, 0.5, 0, and thoughts their sums -1.5 and 0.5, and the plans 2 and -0.5."""
    Chain(tracker, "sum").credit(0, scored_chain())
    metrics = tracker.log_step(1)
    assert (metrics["reward/style_mean"], metrics["think/reward/style_mean"]) == (-0.25, -0.5)
    assert metrics["reward/plan_mean"] == metrics["think/reward/plan_mean"] == 0.75
    assert metrics["reward/minus_mean"] == metrics["image/reward/minus_mean"] != metrics["think/reward/minus_mean"]


def test_weights_of_components_count_on_the_tracks_that_have_them(tracker) -> None:
    """style is 0 for images: they differ by minus alone. a = -2 + 2 x 1 and b = -3 + 2 x -2.5, without the plan."""
    estimator = GroupAdvantage(std="none", clip=None, weights={"minus": 1.0, "style": 2.0})
    found = advantages_of(Chain(tracker, "mean", estimator).credit(0, scored_chain()))
    assert (found["a0"], found["a1"]) == (1.0, -1.0)
    assert (found["a"], found["b"]) == pytest.approx((4.0, -4.0))


def test_a_track_keeps_final_rewards_and_they_decide_which_caption_is_the_best(tracker) -> None:
    own = {"a": 8.0, "b": 1.0, "c": 0.0, "d": 2.0, "e": 0.5, "f": 0.0}
    credited = Chain(tracker, "best_of_n").credit(0, with_own(chain(), "recaption", own, "style", final=True))
    assert rewards_of(credited.propagate_rewards()) == {"a": 8.0, "d": 2.0, "t0": 8.0, "t1": 2.0}
    trained = advantages_of(credited)
    assert {"a", "d"} < set(trained) and not {"b", "e"} & set(trained)
    assert (trained["a1"], trained["b0"]) == (1.0, 3.0)  # the images are still compared by their own rewards


def test_images_without_rewards_are_trained_below_the_best_caption_alone(tracker) -> None:
    resp = chain()
    captions, images = resp.tracks["recaption"], resp.tracks["image"]
    own = {"a": 8.0, "b": 1.0, "c": 0.0, "d": 2.0, "e": 0.5, "f": 0.0}
    resp = resp.with_track("recaption", captions.replace(rewards=torch.tensor([own[i] for i in captions.sample_ids])))
    resp = resp.with_track("image", images.replace(rewards=None, component_rewards=None))
    trained = advantages_of(Chain(tracker, "best_of_n").credit(0, resp))
    assert {i: trained[i] for i in trained if i in IMAGES} == {"a0": 3.5, "a1": 3.5, "d0": 0.75, "d1": 0.75}
