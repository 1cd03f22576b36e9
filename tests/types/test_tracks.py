"""Tracks: rewards travel up the tree, advantages down, and a request's ids say who is whose sibling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.distributed.group.dispatch import rank_rows, sent_order
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.steps import FractionSteps
from unirl.types.primitives import Texts
from unirl.types.results import Metric, merge, values
from unirl.types.reward import ScoringFailure
from unirl.types.rollout_req import RolloutReq, TrackSpec, child_ids, group_id
from unirl.types.rollout_resp import AdvantageResult, RolloutResp, RolloutTrack, Scores
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import stored_positions


def track(ids: list[str], groups: list[str], **fields) -> RolloutTrack:
    count = len(ids)
    defaults = {
        "sample_ids": ids,
        "group_ids": groups,
        "conditions": {},
        "segment": Texts(texts=ids),
        "weight": torch.ones(count),
        "weight_version": torch.zeros(count, dtype=torch.int64),
    }
    return RolloutTrack(**(defaults | fields))


def tree(rewards: list[float], weight: list[float] | None = None) -> RolloutResp:
    parents = ["p:0", "p:1"]
    children = child_ids(parents, "image", 2)
    child = track(
        children,
        [parent for parent in parents for _ in range(2)],
        parent_track="ar",
        parent_ids=[parent for parent in parents for _ in range(2)],
        rewards=torch.tensor(rewards),
        weight=torch.tensor(weight or [1.0] * 4),
    )
    return RolloutResp({"ar": track(parents, ["p", "p"]), "image": child})


@pytest.mark.parametrize(
    ("op", "expected"),
    [("mean", [2.0, 5.0]), ("max", [3.0, 6.0]), ("sum", [4.0, 10.0]), ("last", [3.0, 4.0])],
)
def test_a_parent_is_rewarded_by_its_own_children(op, expected) -> None:
    resp = tree([1.0, 3.0, 6.0, 4.0]).propagate_rewards(op)
    assert resp.tracks["ar"].rewards.tolist() == expected


def test_a_dropped_child_does_not_reach_its_parent() -> None:
    resp = tree([1.0, 99.0, 6.0, 4.0], weight=[1.0, 0.0, 1.0, 1.0]).propagate_rewards("mean")
    assert resp.tracks["ar"].rewards.tolist() == [1.0, 5.0]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("mean", [3.0, 5.5]), ("max", [6.0, 9.0]), ("sum", [9.0, 11.0]), ("last", [1.0, 9.0])],
)
def test_rewards_and_components_travel_up_by_lineage_and_weight_and_not_by_position(op, expected) -> None:
    """b0 = {2, 6, 1}, b1 = {2, 9}, their children interleaved among two that do not count."""
    scores = torch.tensor([2.0, 2.0, 77.0, 6.0, float("nan"), 1.0, 9.0])
    parents = ["b0", "b1", "b1", "b0", "b0", "b0", "b1"]
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5])
    child = track(
        [f"c{i}" for i in range(7)],
        parents,
        parent_track="top",
        parent_ids=parents,
        rewards=scores,
        component_rewards={"ten": 10 * scores},
        weight=weight,
    )
    dropped = torch.tensor([1.0, 1.0, 0.0])
    resp = RolloutResp({"below": child, "top": track(["b1", "b0", "b2"], ["p"] * 3, weight=dropped)})
    top = resp.propagate_rewards(op).tracks["top"]
    assert top.rewards.tolist() == [*reversed(expected), 0.0]
    assert top.component_rewards["ten"].tolist() == [10 * r for r in top.rewards.tolist()]


def test_rewards_climb_two_levels() -> None:
    resp = deep_tree(2)
    crops = resp.tracks["crop"].replace(rewards=torch.arange(8.0))
    climbed = resp.with_track("crop", crops).propagate_rewards("mean")
    assert climbed.tracks["image"].rewards.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert climbed.tracks["text"].rewards.tolist() == [1.5, 5.5]


def test_tracks_below_the_scored_one_stay_unscored() -> None:
    resp = deep_tree(2)
    scored = resp.with_track("text", resp.tracks["text"].replace(rewards=torch.tensor([1.0, 2.0])))
    assert {name: t.rewards is None for name, t in scored.propagate_rewards().tracks.items()} == {
        "text": False,
        "image": True,
        "crop": True,
    }


def test_the_unscored_sibling_of_a_scored_leaf_is_refused() -> None:
    child = track(["p:0/b0"], ["p:0"], parent_track="top", parent_ids=["p:0"])
    resp = RolloutResp({"top": track(["p:0"], ["p"]), "a": child.replace(rewards=torch.ones(1)), "b": child})
    with pytest.raises(ValueError, match=r"track 'b' is a leaf without rewards"):
        resp.propagate_rewards()


def test_a_parent_without_living_children_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"row 'p:1' of track 'ar' has no child"):
        tree([1.0, 3.0, 6.0, 4.0], weight=[1.0, 1.0, 0.0, 0.0]).propagate_rewards("mean")


def test_rewards_of_children_are_added_once_to_those_that_exist() -> None:
    resp = tree([1.0, 3.0, 6.0, 4.0])
    scored = resp.with_track("ar", resp.tracks["ar"].replace(rewards=torch.tensor([7.0, 8.0])))
    added = scored.propagate_rewards()
    assert added.tracks["ar"].rewards.tolist() == [9.0, 13.0]
    assert added.propagate_rewards().tracks["ar"].rewards.tolist() == [9.0, 13.0]


def test_rewards_that_are_final_are_kept() -> None:
    resp = tree([1.0, 3.0, 6.0, 4.0])
    own = resp.tracks["ar"].replace(rewards=torch.tensor([7.0, 8.0]), rewards_are_final=True)
    assert resp.with_track("ar", own).propagate_rewards().tracks["ar"].rewards.tolist() == [7.0, 8.0]


def test_a_component_of_a_parent_and_its_child_may_not_have_one_name() -> None:
    resp = tree([1.0, 3.0, 6.0, 4.0])
    both = {"ar": torch.tensor([7.0, 8.0]), "image": torch.ones(4)}
    for name, scores in both.items():
        resp = resp.with_track(name, resp.tracks[name].replace(rewards=scores, component_rewards={"judge": scores}))
    with pytest.raises(ValueError, match="tracks 'ar' and 'image' both have a component 'judge'"):
        resp.propagate_rewards()


def test_rows_see_the_scores_and_failures_of_the_rows_above_them() -> None:
    """The first text has no reward, so its images have none either. Its failure stands first where it is the cause."""
    why, other = ScoringFailure("judge", "no answer"), ScoringFailure("logged", "no server")
    texts = track(
        ["p:0", "p:1"],
        ["p", "p"],
        rewards=torch.tensor([float("nan"), 2.0]),
        component_rewards={"judge": torch.tensor([float("nan"), 2.0])},
        logged_rewards={"words": torch.tensor([7.0, 8.0])},
        failures=[(why,), ()],
    )
    parents = ["p:1", "p:0", "p:0"]
    images = track(
        ["b", "a0", "a1"],
        parents,
        parent_track="text",
        parent_ids=parents,
        rewards=torch.tensor([5.0, 6.0, float("nan")]),
        component_rewards={"clip": torch.tensor([5.0, 6.0, float("nan")])},
        failures=[(other,), (other,), (other,)],
    )
    seen = RolloutResp({"image": images, "text": texts}).with_scores_above("image")
    torch.testing.assert_close(seen.rewards, torch.tensor([5.0, float("nan"), float("nan")]), equal_nan=True)
    assert seen.logged_rewards["words"].tolist() == [8.0, 7.0, 7.0]
    assert seen.component_rewards["judge"].isnan().tolist() == [False, True, True]
    assert seen.component_rewards["clip"].isnan().tolist() == [False, False, True]
    assert seen.failures == [(other,), (why, other), (other, why)]


def test_an_unscored_leaf_is_refused() -> None:
    with pytest.raises(ValueError, match=r"track 'ar' is a leaf without rewards"):
        RolloutResp({"ar": track(["p:0"], ["p"])}).propagate_rewards()


def test_children_inherit_their_parents_advantage() -> None:
    resp = tree([1.0, 3.0, 6.0, 4.0])
    resp = resp.with_track("ar", resp.tracks["ar"].replace(advantages=torch.tensor([-1.0, 2.0])))
    assert resp.inherit_advantages("image").tracks["image"].advantages.tolist() == [-1.0, -1.0, 2.0, 2.0]


def test_children_of_a_row_that_is_not_trained_are_not_trained_either() -> None:
    resp = tree([1.0, 3.0, 6.0, 4.0], weight=[1.0, 0.5, 0.0, 0.5])
    parents = resp.tracks["ar"].replace(advantages=torch.tensor([-1.0, 2.0]), weight=torch.tensor([0.0, 1.0]))
    image = resp.with_track("ar", parents).inherit_advantages("image").tracks["image"]
    assert image.weight.tolist() == [0.0, 0.0, 0.0, 0.5]
    assert image.advantages.tolist() == [0.0, 0.0, 0.0, 2.0]


def deep_tree(roots: int, j_major: bool = False) -> RolloutResp:
    """Two levels below the roots, 2 children per row; `j_major` rows stand by child number first."""

    def level(name: str, parent: str, parents: list[str]) -> RolloutTrack:
        ids = child_ids(parents, name, 2)
        ids = sorted(ids, key=lambda i: i[-1]) if j_major else ids
        return track(ids, ids, parent_track=parent, parent_ids=[i.rpartition("/")[0] for i in ids])

    top = [f"p:{i}" for i in range(roots)]
    middle = level("image", "text", top)
    return RolloutResp({"text": track(top, top), "image": middle, "crop": level("crop", "image", middle.sample_ids)})


def ids_of(resp: RolloutResp) -> dict[str, list[str]]:
    return {name: member.sample_ids for name, member in resp.tracks.items()}


def test_selected_rows_bring_their_descendants() -> None:
    chosen = deep_tree(3).select([2, 0])
    assert len(chosen) == 2 and chosen.tracks["text"].sample_ids == ["p:2", "p:0"]
    assert chosen.tracks["image"].sample_ids == child_ids(["p:2", "p:0"], "image", 2)
    assert chosen.tracks["crop"].sample_ids == child_ids(chosen.tracks["image"].sample_ids, "crop", 2)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_a_tree_cut_over_ranks_comes_back_as_it_was_sent(roots, num_updates, num_ranks, j_major) -> None:
    resp = deep_tree(roots, j_major)
    rows = rank_rows(roots, num_updates, num_ranks)
    back = RolloutResp.concat([resp.select(share) for share in rows]).select(sent_order(rows))
    assert ids_of(back) == ids_of(resp.select(range(roots)))
    assert {name: sorted(ids) for name, ids in ids_of(back).items()} == {
        name: sorted(ids) for name, ids in ids_of(resp).items()
    }


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans(), st.data())
def test_each_copy_of_a_row_has_its_own_copies_of_the_descendants(indices, j_major, data) -> None:
    resp = deep_tree(3, j_major)
    copies = resp.select(indices)
    assert {name: len(member) for name, member in copies.tracks.items()} == {
        "text": len(indices),
        "image": 2 * len(indices),
        "crop": 4 * len(indices),
    }
    again = data.draw(st.permutations(range(len(indices))))
    assert ids_of(copies.select(again)) == ids_of(resp.select([indices[i] for i in again]))


def test_a_parent_id_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parent id 'q' is not in track 'ar'"):
        RolloutResp(
            {
                "ar": track(["p:0"], ["p"]),
                "image": track(["p:0/image0"], ["p:0"], parent_track="ar", parent_ids=["q"]),
            }
        )


def test_the_estimator_gets_rewards_groups_weights_and_where_the_run_stands() -> None:
    seen = []

    def estimator(scores: Scores) -> AdvantageResult:
        seen.append(scores)
        return AdvantageResult(
            advantages=scores.total * 2, weight=torch.tensor([0.0, 1.0]), metrics={"x": Metric.sum(1.0)}
        )

    rewards, weight = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    scored = track(["p:0", "p:1"], ["p", "p"], rewards=rewards, weight=weight, component_rewards={"ocr": rewards})
    credited, metrics = scored.compute_advantages(estimator, 0.25, "image")
    assert (credited.advantages.tolist(), credited.weight.tolist()) == ([2.0, 4.0], [0.0, 1.0])
    assert values(metrics) == {"x": 1.0}
    [scores] = seen
    assert scores.total is rewards and scores.weight is weight and scores.components == {"ocr": rewards}
    assert (scores.group_ids, scores.track, scores.progress) == (["p", "p"], "image", 0.25)


def test_without_components_and_progress_there_are_none() -> None:
    def estimator(scores: Scores) -> AdvantageResult:
        assert (dict(scores.components), scores.track, scores.progress) == ({}, "", 0.0)
        return AdvantageResult(advantages=scores.total, weight=scores.weight, metrics={})

    track(["p:0"], ["p"], rewards=torch.tensor([1.0])).compute_advantages(estimator)


def test_advantages_before_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="compute_advantages needs rewards"):
        track(["p:0"], ["p"]).compute_advantages(lambda scores: pytest.fail("called"))


def test_expanded_requests_keep_siblings_adjacent_and_ids_unique() -> None:
    params = DiffusionSamplingParams(kernel=EulerODE())
    req = RolloutReq(
        sample_ids=["a@0", "b@0"],
        group_ids=[group_id("a", 0), group_id("b", 0)],
        primitives={"text": Texts(texts=["A", "B"])},
        metadata=[{}, {}],
        tracks={"image": TrackSpec(sampling=params)},
        purpose="r",
        step=0,
    ).expand(3)
    assert req.sample_ids == ["a@0:0", "a@0:1", "a@0:2", "b@0:0", "b@0:1", "b@0:2"]
    assert req.primitives["text"].texts == ["A", "A", "A", "B", "B", "B"]


def test_stochastic_steps_come_from_the_list_then_the_choice_then_all() -> None:
    flow = FlowSDEStrategy(eta=0.7)
    choice = FractionSteps(low=0.0, high=0.5, num_steps=2)
    assert DiffusionSamplingParams(kernel=flow).resolve_sde_indices(0) == tuple(range(9))
    chosen = DiffusionSamplingParams(kernel=flow, sde_steps=choice).resolve_sde_indices(3)
    assert len(chosen) == 2 and set(chosen) <= set(range(5))
    both = DiffusionSamplingParams(kernel=flow, sde_steps=choice, sde_indices=(4, 1))
    assert both.resolve_sde_indices(3) == (1, 4)
    assert DiffusionSamplingParams(kernel=flow, sde_indices=()).resolve_sde_indices(0) == ()
    assert DiffusionSamplingParams(kernel=EulerODE()).resolve_sde_indices(0) == ()


def test_the_last_step_is_never_stochastic() -> None:
    with pytest.raises(ValueError, match=r"holds \[9\]: a stochastic step lies within 0..8"):
        DiffusionSamplingParams(kernel=FlowSDEStrategy(), sde_indices=(9,))


def test_pinning_writes_the_steps_out_and_is_idempotent() -> None:
    params = DiffusionSamplingParams(
        kernel=FlowSDEStrategy(), num_inference_steps=4, sde_steps=FractionSteps(low=0.0, high=1.0, num_steps=2)
    )
    pinned = params.pinned(7, (1.0, 0.9, 0.7, 0.4, 0.0))
    assert pinned.sde_indices == params.resolve_sde_indices(7) and pinned.sde_steps is None
    assert pinned.pinned(8, pinned.sigmas) == pinned


def test_a_schedule_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 11 decreasing values that end in 0"):
        DiffusionSamplingParams(kernel=EulerODE(), sigmas=(1.0, 0.0))


def test_stored_positions_are_both_ends_of_each_stochastic_step_and_the_sample() -> None:
    assert stored_positions((0, 2, 3), 10) == (0, 1, 2, 3, 4, 10)
    assert stored_positions((), 10) == (10,)


def test_merged_means_weigh_by_their_elements() -> None:
    merged = merge([{"m": Metric.mean(1.0, 3), "x": Metric.max(2.0)}, {"m": Metric.mean(5.0, 1), "x": Metric.max(1.0)}])
    assert values(merged) == {"m": 2.0, "x": 2.0}


def test_a_root_mean_square_has_the_same_bits_however_its_elements_are_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        losses = torch.randn(96, generator=generator).clamp(min=0.01)
        whole = Metric.rms(losses, torch.ones(96)).value
        for sizes in ([32, 64], [4] * 24, [1] * 96):
            parts = [{"m": Metric.rms(part, torch.ones(len(part)))} for part in losses.split(sizes)]
            assert merge(parts)["m"].value == whole
        assert whole == pytest.approx(float(losses.double().square().mean().sqrt()), rel=1e-6)


def test_metrics_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        Metric.sum(1.0).merged(Metric.mean(1.0))
