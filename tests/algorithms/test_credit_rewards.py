"""Several rewards: weighed before or after they are standardised, by weights that may change over the run."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms.shared.advantages import Estimator, GroupAdvantage, Ramp, RunningAdvantage
from unirl.algorithms.shared.groups import Selection
from unirl.config.build import build, check_node
from unirl.config.errors import ConfigError, RewardError
from unirl.config.foreign_keys import WRITE_INSTEAD
from unirl.config.schema import schema_of
from unirl.config.targets import find_target
from unirl.types.results import values
from unirl.types.rollout_resp import AdvantageResult, Scores

OCR = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5])
HPS = torch.tensor([20.0, 22.0, 30.0, 24.0, 21.0, 27.0])
GROUPS = ["a@0", "a@0", "a@0", "b@0", "b@0", "b@0"]


def credited(
    estimator: Estimator, components: dict[str, Tensor], progress: float = 0.0, weight: Tensor | None = None
) -> AdvantageResult:
    return estimator(
        Scores(
            total=torch.stack(list(components.values())).nan_to_num(0.0).sum(0),
            components=components,
            group_ids=GROUPS,
            weight=torch.ones(6) if weight is None else weight,
            progress=progress,
        )
    )


def zscore(values: Tensor) -> Tensor:
    groups = values.double().view(2, 3)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)).flatten()


def test_weighted_rewards_are_standardised_as_one_reward() -> None:
    result = credited(GroupAdvantage(weights={"ocr": 2.0, "hps": -0.5}, clip=None), {"ocr": OCR, "hps": HPS})
    expected = zscore(2.0 * OCR.double() - 0.5 * HPS.double())
    np.testing.assert_allclose(result.advantages.numpy(), expected.numpy(), rtol=1e-5)


def test_without_weights_the_total_is_used() -> None:
    result = credited(GroupAdvantage(clip=None), {"ocr": OCR, "hps": HPS})
    np.testing.assert_allclose(result.advantages.numpy(), zscore(OCR.double() + HPS.double()).numpy(), rtol=1e-5)


def test_weighted_advantages_are_standardised_per_reward() -> None:
    estimator = GroupAdvantage(weights={"ocr": 2.0, "hps": 0.5}, combine="advantages", clip=None)
    result = credited(estimator, {"ocr": OCR, "hps": HPS})
    np.testing.assert_allclose(result.advantages.numpy(), (2.0 * zscore(OCR) + 0.5 * zscore(HPS)).numpy(), rtol=1e-5)


def test_gdpo_by_hand() -> None:
    """Two rewards over two groups of two: z-scores are +-1, so sums are w1 +- w2, and the batch has their spread."""
    components = {"x": torch.tensor([0.0, 8.0, 3.0, 1.0, 0.0, 0.0]), "y": torch.tensor([5.0, 6.0, 2.0, 9.0, 0.0, 0.0])}
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    scores = Scores(
        total=components["x"], components=components, group_ids=["a", "a", "b", "b", "b", "b"], weight=weight
    )
    estimator = GroupAdvantage(weights={"x": 1.0, "y": 3.0}, combine="advantages", whiten=True, eps=1e-12)
    # a: x -1 +1, y -1 +1 -> -4 +4.  b: x +1 -1, y -1 +1 -> -2 +2.  mean 0, variance (16 + 16 + 4 + 4) / 4 = 10
    expected = [-4 / math.sqrt(10), 4 / math.sqrt(10), -2 / math.sqrt(10), 2 / math.sqrt(10), 0.0, 0.0]
    assert estimator(scores).advantages.tolist() == pytest.approx(expected, rel=1e-6)


def test_gdpo_is_invariant_to_the_scale_of_a_reward() -> None:
    before, after = (
        credited(GroupAdvantage(weights={"ocr": 1.0, "hps": 1.0}, combine="advantages"), {"ocr": OCR, "hps": hps})
        for hps in (HPS, 1000 * HPS)
    )
    assert torch.allclose(before.advantages, after.advantages, rtol=1e-4)


def test_a_reward_that_is_equal_within_a_group_adds_nothing_there() -> None:
    flat = torch.tensor([0.1, 0.1 * (1 + 1.2e-7), 0.1, 0.0, 0.5, 0.5])  # equal but for round-off
    estimator = GroupAdvantage(weights={"flat": 7.0, "hps": 1.0}, combine="advantages", clip=None, eps=1e-12)
    result = credited(estimator, {"flat": flat, "hps": HPS})
    np.testing.assert_allclose(result.advantages[:3].numpy(), zscore(HPS)[:3].numpy(), rtol=1e-5)
    assert values(result.metrics)["rollout/zero_std_group_ratio"] == 0.0


@pytest.mark.parametrize("hps_weight", [1.0, 0.0])
def test_a_group_has_zero_std_if_every_weighted_reward_is_equal_in_it(hps_weight: float) -> None:
    flat = torch.tensor([0.1, 0.1, 0.1, 0.0, 0.5, 0.5])
    estimator = GroupAdvantage(weights={"flat": 1.0, "hps": hps_weight}, combine="advantages")
    result = credited(estimator, {"flat": flat, "hps": HPS})
    assert values(result.metrics)["rollout/zero_std_group_ratio"] == (0.0 if hps_weight else 0.5)
    assert torch.equal(result.advantages[:3], torch.zeros(3)) == (hps_weight == 0.0)


def test_a_component_that_is_not_finite_is_an_error_that_names_it() -> None:
    bad = HPS.clone()
    bad[4] = math.nan
    for combine in ("rewards", "advantages"):
        estimator = GroupAdvantage(weights={"ocr": 1.0, "hps": 1.0}, combine=combine)
        with pytest.raises(RewardError, match=r"the hps reward of row 4 \(group 'b@0'\) is nan") as raised:
            credited(estimator, {"ocr": OCR, "hps": bad})
        assert raised.value.code == 6003
        weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
        assert credited(estimator, {"ocr": OCR, "hps": bad}, weight=weight).advantages.isfinite().all()


def test_a_weight_for_a_reward_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"advantage\.weights\.hpps names no component reward.*'hps'.*hps, ocr"):
        credited(GroupAdvantage(weights={"hpps": 1.0}), {"ocr": OCR, "hps": HPS})


def test_weights_follow_the_progress_of_the_run() -> None:
    ramp = Ramp(points=((0.25, 1.0), (0.75, 0.0)))
    estimator = GroupAdvantage(weights={"ocr": ramp, "hps": 1.0}, combine="advantages", clip=None)
    for progress, weight in ((0.0, 1.0), (0.25, 1.0), (0.4, 0.7), (0.75, 0.0), (1.0, 0.0)):
        result = credited(estimator, {"ocr": OCR, "hps": HPS}, progress)
        expected = weight * zscore(OCR) + zscore(HPS)
        np.testing.assert_allclose(result.advantages.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(
    points=st.lists(st.tuples(st.floats(0, 1), st.floats(-3, 3)), min_size=1, max_size=5, unique_by=lambda p: p[0]),
    progress=st.floats(0, 1),
)
def test_a_ramp_interpolates_as_numpy_does(points: list[tuple[float, float]], progress: float) -> None:
    points = sorted(points)
    expected = np.interp(progress, [p for p, _ in points], [w for _, w in points])
    assert Ramp(points=tuple(points)).at(progress) == pytest.approx(expected, abs=1e-9)


def test_two_points_at_one_progress_make_a_jump() -> None:
    jump = Ramp(points=((0.5, 1.0), (0.5, 0.2)))
    assert [jump.at(p) for p in (0.0, 0.49, 0.5, 1.0)] == [1.0, 1.0, 0.2, 0.2]


@pytest.mark.parametrize("points", [(), ((0.5, 1.0), (0.2, 0.0)), ((0.0, math.inf),), ((-0.1, 1.0),), ((1.1, 1.0),)])
def test_a_ramp_out_of_order_or_range_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match=r"Ramp\.points must be \[progress, weight\] pairs") as raised:
        Ramp(points=points)
    assert raised.value.code == 2004


def test_a_recipe_writes_numbers_and_ramps() -> None:
    tree = {
        "_target_": "unirl.algorithms.shared.advantages.GroupAdvantage",
        "combine": "advantages",
        "weights": {"ocr": 1, "hps": {"points": [[0, 1.0], [0.5, 0.2]]}},
        "select": {"keep": 8},
    }
    node = check_node(tree, path="advantage")
    estimator = build(node)
    assert estimator.weights == {"ocr": 1.0, "hps": Ramp(points=((0.0, 1.0), (0.5, 0.2)))}
    assert estimator.select.keep == 8
    assert build(check_node(node.resolved(), path="advantage")) == estimator


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"select": {"keep": 5}}, r"^advantage\.select\.keep must be an even number"),
        ({"weights": {"hps": {"points": [[0.5, 1], [0.1, 1]]}}}, r"^advantage\.weights\.hps\.points must be"),
        ({"combine": "advantages"}, r"^advantage\.combine=advantages needs advantage\.weights"),
    ],
)
def test_a_recipe_is_refused_by_the_path_of_the_key(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        check_node({"_target_": "unirl.algorithms.shared.advantages.GroupAdvantage"} | keys, path="advantage")
    assert raised.value.code == 2004


def test_keys_of_other_frameworks_are_answered_with_our_keys() -> None:
    answers = " ".join(WRITE_INSTEAD.values())
    keys = set(re.findall(r"advantage\.(?!select)(\w+)", answers))
    rules = set(re.findall(r"advantage\.select\.(\w+)", answers))
    assert {"std", "weights", "trim"} <= keys <= set(schema_of(GroupAdvantage).keys)
    assert rules == set(schema_of(Selection).keys)
    assert find_target("unirl.algorithms.shared.advantages.RunningAdvantage", "advantage", ()) is RunningAdvantage
    with pytest.raises(ConfigError, match=r"unknown key 'advantage\.bestofn'.*Write advantage\.select\.keep="):
        check_node({"_target_": "unirl.algorithms.shared.advantages.GroupAdvantage", "bestofn": 8}, path="advantage")
