"""Which rows are trained, and that nothing else changes by it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.algorithms.shared.groups import Selection
from unirl.config.errors import ConfigError
from unirl.types.results import values
from unirl.types.rollout_resp import AdvantageResult, Scores


def ids(*sizes: int) -> list[str]:
    return [f"p{g}@0" for g, size in enumerate(sizes) for _ in range(size)]


def result(rewards: Tensor, group_ids: list[str], weight: Tensor | None = None, **rules: Any) -> AdvantageResult:
    weight = torch.ones(len(rewards)) if weight is None else weight
    return GroupAdvantage(select=Selection(**rules))(Scores(total=rewards, group_ids=group_ids, weight=weight))


def trained(rewards: list[float], group_ids: list[str], **rules: Any) -> list[float]:
    return result(torch.tensor(rewards), group_ids, **rules).weight.tolist()


def test_by_default_every_row_is_trained_and_nothing_is_logged() -> None:
    weight = torch.tensor([1.0, 0.5, 0.0, 1.0])
    actual = result(torch.tensor([0.0, 1.0, 2.0, 4.0]), ids(4), weight)
    assert torch.equal(actual.weight, weight)
    assert not {"rollout/selected_ratio", "rollout/filtered_group_ratio"} & set(actual.metrics)


@settings(deadline=None)
@given(
    rewards=st.permutations(range(30)),
    cuts=st.tuples(st.integers(1, 29), st.integers(1, 29)),
    half=st.integers(1, 6),
    order=st.permutations(range(30)),
)
def test_the_best_and_the_worst_of_each_group_are_trained(
    rewards: list[int], cuts: tuple[int, int], half: int, order: list[int]
) -> None:
    low, high = sorted(cuts)
    sorted_ids = ids(low, high - low, 30 - high)
    group_ids = [sorted_ids[i] for i in order]
    expected = [0.0] * 30
    for id in set(group_ids):
        rows = sorted((i for i in range(30) if group_ids[i] == id), key=lambda i: rewards[i])
        for i in {*rows[:half], *rows[-half:]}:
            expected[i] = 1.0
    assert trained([float(r) for r in rewards], group_ids, keep=2 * half) == expected


def test_eight_of_twenty_four_are_kept_as_dancegrpo_does() -> None:
    rewards = torch.randperm(48, generator=torch.Generator().manual_seed(0)).float()
    actual = result(rewards, ids(24, 24), keep=8)
    for group in (slice(0, 24), slice(24, 48)):
        ranked = rewards[group].argsort()
        assert set(actual.weight[group].nonzero().flatten().tolist()) == {*ranked[:4].tolist(), *ranked[-4:].tolist()}
    assert values(actual.metrics)["rollout/selected_ratio"] == pytest.approx(1 / 3)
    assert values(actual.metrics)["rollout/filtered_group_ratio"] == 0.0


@pytest.mark.parametrize("rules", [{"keep": 2}, {"drop_dead": True}, {"mean_range": (0.4, 0.8)}])
def test_statistics_are_those_of_the_whole_group(rules: dict[str, Any]) -> None:
    rewards = torch.tensor([0.0, 1.0, 0.2, 0.7, 0.5, 0.5, 0.5, 0.5, 0.1, 0.2, 0.0, 0.3])
    everything, actual = result(rewards, ids(4, 4, 4)), result(rewards, ids(4, 4, 4), **rules)
    assert 0 < actual.weight.sum() < 12
    kept = actual.weight > 0
    assert torch.equal(actual.advantages[kept], everything.advantages[kept])
    assert torch.equal(actual.advantages[~kept], torch.zeros(int((~kept).sum())))
    before, after = values(everything.metrics), values(actual.metrics)
    assert {name: after[name] for name in before} == before


def test_advantages_are_ranked_before_they_are_clipped() -> None:
    rewards = torch.zeros(60)
    rewards[10], rewards[50] = 9.0, 8.0  # both beyond the clip
    actual = result(rewards, ids(60), keep=2)
    assert actual.weight[10] == 1.0 and actual.weight[50] == 0.0
    assert float(actual.advantages[10]) == 5.0


def test_a_small_group_is_kept_whole_and_dropped_rows_are_not_among_the_worst() -> None:
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    rewards = torch.tensor([1.0, 2.0, -9.0, 3.0, math.nan, 4.0, 5.0])
    actual = result(rewards, ids(3, 4), weight, keep=2)
    assert actual.weight.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert values(actual.metrics)["rollout/selected_ratio"] == pytest.approx(4 / 5)


def test_equal_advantages_are_taken_in_row_order_from_both_ends() -> None:
    assert trained([1.0, 1.0, 1.0, 1.0, 1.0], ids(5), keep=2) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_groups_of_equal_rewards_are_left_out_and_counted() -> None:
    actual = result(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.1, 0.1]), ids(2, 2, 2), drop_dead=True)
    assert actual.weight.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert values(actual.metrics)["rollout/filtered_group_ratio"] == pytest.approx(2 / 3)
    assert values(actual.metrics)["rollout/zero_std_group_ratio"] == pytest.approx(2 / 3)


def test_a_group_that_differs_in_one_of_several_rewards_is_informative() -> None:
    estimator = GroupAdvantage(weights={"a": 1.0, "b": 1.0}, combine="advantages", select=Selection(drop_dead=True))
    components = {"a": torch.tensor([0.0, 1.0, 2.0, 2.0]), "b": torch.tensor([4.0, 4.0, 3.0, 3.0])}
    total = torch.tensor([4.0, 4.0, 5.0, 5.0])
    actual = estimator(Scores(total=total, components=components, group_ids=ids(2, 2), weight=torch.ones(4)))
    assert actual.weight.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_groups_that_are_too_hard_or_too_easy_are_left_out() -> None:
    rewards = [0.0, 0.1, 0.2, 0.8, 1.0, 1.0, 0.5, 0.5]
    assert trained(rewards, ids(2, 2, 2, 2), mean_range=(0.2, 0.9)) == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert trained(rewards, ids(2, 2, 2, 2), mean_range=(0.5, 1.0)) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_dropped_row_does_not_change_the_mean_of_its_group() -> None:
    weight = torch.tensor([1.0, 1.0, 0.0])
    assert result(torch.tensor([0.4, 0.6, 99.0]), ids(3), weight, mean_range=(0.0, 1.0)).weight.tolist() == [1, 1, 0]


def test_rules_combine_and_fractional_weights_stay() -> None:
    weight = torch.tensor([0.5, 1.0, 1.0, 0.5, 1.0, 1.0])
    actual = result(torch.tensor([0.1, 0.2, 0.3, 7.0, 8.0, 9.0]), ids(3, 3), weight, keep=2, mean_range=(0.0, 1.0))
    assert actual.weight.tolist() == [0.5, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keep": 3}, "keep must be an even number >= 2"),
        ({"keep": 0}, "keep must be an even number >= 2"),
        ({"mean_range": (0.9, 0.1)}, r"mean_range must be \[low, high\].*\[0\.9, 0\.1\]"),
    ],
)
def test_rules_out_of_range_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Selection(**rules)
    assert raised.value.code == 2004
