"""Group advantages against their algebra, and against the papers' formulas over lists of numbers."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.config.errors import ConfigError, RewardError
from unirl.types.results import values
from unirl.types.rollout_resp import AdvantageResult, Scores


def ids(groups: int, size: int) -> list[str]:
    return [f"p{g}@0" for g in range(groups) for _ in range(size)]


def rewards_of(groups: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(groups * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def result(rewards: Tensor, group_ids: list[str], weight: Tensor | None = None, **options: Any) -> AdvantageResult:
    weight = torch.ones(len(rewards)) if weight is None else weight
    return GroupAdvantage(**options)(Scores(total=rewards, group_ids=group_ids, weight=weight))


def advantages(rewards: Tensor, group_ids: list[str], weight: Tensor | None = None, **options: Any) -> Tensor:
    return result(rewards, group_ids, weight, **options).advantages


@settings(deadline=None)
@given(groups=st.integers(1, 4), size=st.integers(2, 9), seed=st.integers(0, 99))
def test_own_std_gives_sum_zero_and_sum_of_squares_n_per_group(groups: int, size: int, seed: int) -> None:
    rewards = rewards_of(groups, size, seed)
    actual = advantages(rewards, ids(groups, size), clip=None).double().view(groups, size)
    assert actual.sum(1).abs().max() < 1e-5 * size
    std = rewards.double().view(groups, size).std(dim=1, correction=0)
    expected = size * (std / (std + 1e-6)).square()  # n, but for eps where a group's rewards hardly differ
    assert torch.allclose(actual.square().sum(1), expected, rtol=1e-4)


def test_formula_of_the_paper_with_population_std_and_eps_outside_the_root() -> None:
    r = rewards_of(3, 5).numpy().reshape(3, 5)
    centred = r - r.mean(1, keepdims=True)
    for std, divisor in (
        ("group", r.std(1, keepdims=True) + 0.1),
        ("batch", r.std() + 0.1),
        ("none", 1.0),
    ):
        actual = advantages(torch.tensor(r).flatten(), ids(3, 5), std=std, eps=0.1).numpy().reshape(3, 5)
        np.testing.assert_allclose(actual, centred / divisor, rtol=1e-6)
    actual = advantages(torch.tensor(r).flatten(), ids(3, 5), scope="global", eps=0.1).numpy().reshape(3, 5)
    np.testing.assert_allclose(actual, (r - r.mean()) / (r.std() + 0.1), rtol=1e-6)


def test_affine_changes_of_the_rewards_do_not_change_advantages() -> None:
    r = rewards_of(2, 6)
    plain = advantages(r, ids(2, 6), eps=1e-12)
    assert torch.allclose(plain, advantages(7 * r - 3, ids(2, 6), eps=1e-12), rtol=1e-6)


def test_one_hot_rewards_reach_the_root_of_n_minus_one_and_the_clip_bounds_them() -> None:
    r = torch.zeros(24)
    r[5] = 1
    assert float(advantages(r, ids(1, 24)).max()) == pytest.approx(math.sqrt(23), rel=1e-4)
    wide = torch.zeros(48)
    wide[5] = 1
    actual = advantages(wide, ids(1, 48))
    assert float(actual.max()) == 5.0
    assert float(advantages(wide, ids(1, 48), clip=None).max()) == pytest.approx(math.sqrt(47), rel=1e-4)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_that_float32_cannot_represent_give_exactly_zero(std: str) -> None:
    r = torch.full((12,), 0.1)
    naive = (r - r.mean()) / (r.std() + 1e-8)
    assert naive.abs().min() > 0.1  # the hazard: round-off over round-off, with one sign for the whole group
    actual = result(torch.cat([r, rewards_of(1, 12).float()]), ids(2, 12), std=std)
    assert torch.equal(actual.advantages[:12], torch.zeros(12))
    assert actual.advantages[12:].abs().min() > 0
    assert values(actual.metrics)["rollout/zero_std_group_ratio"] == 0.5


def test_rewards_that_differ_by_round_off_count_as_equal() -> None:
    r = torch.tensor([0.1, 0.1, 0.1, 0.1]) * torch.tensor([1.0, 1 + 1.2e-7, 1.0, 1 - 6e-8])
    assert torch.equal(advantages(r, ids(1, 4)), torch.zeros(4))
    assert advantages(torch.tensor([1e-8, 2e-8]), ids(1, 2), eps=1e-12).abs().min() > 0.9


def test_groups_of_equal_rewards_give_zeros_without_a_division_by_zero() -> None:
    assert torch.equal(advantages(torch.ones(6), ids(2, 3), std="batch"), torch.zeros(6))


@settings(deadline=None)
@given(seed=st.integers(0, 999), std=st.sampled_from(["group", "batch", "none"]))
def test_permuting_rows_permutes_advantages(seed: int, std: str) -> None:
    r, group_ids = rewards_of(3, 4, seed), ids(3, 4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
    permuted = advantages(r[order], [group_ids[i] for i in order], std=std)
    assert torch.allclose(permuted, advantages(r, group_ids, std=std)[order], atol=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("bad", [1e9, math.nan, math.inf])
def test_a_row_of_weight_zero_is_zero_and_changes_no_other(std: str, bad: float) -> None:
    r, weight = rewards_of(2, 4), torch.ones(8)
    weight[3] = 0
    r[3] = bad
    actual = advantages(r, ids(2, 4), weight, std=std)
    rest = [0, 1, 2, 4, 5, 6, 7]
    alone = advantages(r[rest], [ids(2, 4)[i] for i in rest], std=std)
    assert actual[3] == 0 and torch.equal(actual[rest], alone)


def test_a_group_without_valid_rows_is_not_counted_as_zero_std() -> None:
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    actual = result(torch.tensor([0.0, 1.0, 5.0, 5.0]), ids(2, 2), weight)
    assert values(actual.metrics)["rollout/zero_std_group_ratio"] == 0.0
    assert values(actual.metrics)["rollout/adv_abs_mean"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_names_row_and_group(bad: float) -> None:
    r = torch.tensor([0.0, 1.0, bad, 1.0])
    with pytest.raises(RewardError, match=r"row 2 \(group 'p1@0'\)") as raised:
        advantages(r, ids(2, 2))
    assert raised.value.code == 6003


# Other estimators: keys of the same formula

Numbers = list[float]
Formula = Callable[[Numbers, Numbers, int], float]
"""(rewards of the row's group, of the step, which of the group) -> its advantage."""


def loo(group: Numbers, i: int) -> float:
    return group[i] - statistics.fmean(group[:i] + group[i + 1 :])


def middle(group: Numbers, share: float) -> Numbers:
    cut = math.floor(len(group) * share + 1e-9)
    return sorted(group)[cut : len(group) - cut]


PAPERS: dict[str, tuple[dict[str, Any], Formula]] = {
    "grpo": ({}, lambda g, all, i: (g[i] - statistics.fmean(g)) / statistics.pstdev(g)),
    "flow-grpo": ({"std": "batch"}, lambda g, all, i: (g[i] - statistics.fmean(g)) / statistics.pstdev(all)),
    "dancegrpo": ({"unbiased": True}, lambda g, all, i: (g[i] - statistics.fmean(g)) / statistics.stdev(g)),
    "trl batch": (
        {"std": "batch", "unbiased": True},
        lambda g, all, i: (g[i] - statistics.fmean(g)) / statistics.stdev(all),
    ),
    "dr.grpo": ({"std": "none"}, lambda g, all, i: g[i] - statistics.fmean(g)),
    "rloo": ({"std": "none", "leave_one_out": True}, lambda g, all, i: loo(g, i)),
    "rloo / std": ({"leave_one_out": True}, lambda g, all, i: loo(g, i) / statistics.pstdev(g)),
    "reinforce++": ({"scope": "global"}, lambda g, all, i: (g[i] - statistics.fmean(all)) / statistics.pstdev(all)),
    "trimmed": (
        {"trim": 0.2},
        lambda g, all, i: (g[i] - statistics.fmean(middle(g, 0.2))) / statistics.pstdev(middle(g, 0.2)),
    ),
    "trimmed, batch": (
        {"trim": 0.1, "std": "batch", "unbiased": True},
        lambda g, all, i: (g[i] - statistics.fmean(middle(g, 0.1))) / statistics.stdev(middle(all, 0.1)),
    ),
}


@st.composite
def ragged_steps(draw: st.DrawFn) -> tuple[Tensor, list[str]]:
    """Rewards of groups of unequal size whose siblings stand anywhere; within a group all differ."""
    sizes = draw(st.lists(st.integers(3, 11), min_size=1, max_size=5))
    group_ids = draw(st.permutations([f"p{g}@0" for g, size in enumerate(sizes) for _ in range(size)]))
    spread = draw(st.permutations(range(len(group_ids))))
    return torch.tensor(spread, dtype=torch.float64) * 0.37 - 2.0, list(group_ids)


@pytest.mark.parametrize("name", PAPERS)
@settings(deadline=None, max_examples=30)
@given(step=ragged_steps())
def test_every_estimator_is_its_papers_formula_on_groups_of_any_size_and_order(
    name: str, step: tuple[Tensor, list[str]]
) -> None:
    rewards, group_ids = step
    options, formula = PAPERS[name]
    expected = []
    for i, id in enumerate(group_ids):
        rows = [j for j, other in enumerate(group_ids) if other == id]
        expected.append(formula(rewards[rows].tolist(), rewards.tolist(), rows.index(i)))
    actual = advantages(rewards, group_ids, clip=None, eps=1e-12, **options)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(groups=st.integers(1, 4), size=st.integers(2, 9), seed=st.integers(0, 99))
def test_the_unbiased_std_gives_a_sum_of_squares_of_n_minus_one(groups: int, size: int, seed: int) -> None:
    actual = advantages(rewards_of(groups, size, seed), ids(groups, size), clip=None, eps=1e-12, unbiased=True)
    squares = actual.double().view(groups, size).square().sum(1)
    assert torch.allclose(squares, torch.full_like(squares, size - 1), rtol=1e-5)


def test_one_hot_rewards_reach_n_minus_one_over_root_n_by_the_unbiased_std() -> None:
    r = torch.zeros(24)
    r[5] = 1
    assert float(advantages(r, ids(1, 24), unbiased=True).max()) == pytest.approx(23 / math.sqrt(24), rel=1e-4)


def test_leaving_one_out_is_n_over_n_minus_one_times_dr_grpo() -> None:
    r = rewards_of(3, 6)
    centred = advantages(r, ids(3, 6), std="none", clip=None)
    assert torch.allclose(advantages(r, ids(3, 6), std="none", clip=None, leave_one_out=True), 6 / 5 * centred)


def test_leave_one_out_in_a_group_of_one_gives_zero() -> None:
    actual = result(torch.tensor([1.0, 5.0, 7.0]), ["a@0", "b@0", "b@0"], std="none", leave_one_out=True)
    assert actual.advantages.tolist() == [0.0, -2.0, 2.0]
    assert values(actual.metrics)["rollout/zero_std_group_ratio"] == 0.5


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("options", [{"scope": "global", "std": "none"}, {"std": "none"}, {"std": "group"}])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_valid_rows(
    options: dict[str, Any], unbiased: bool
) -> None:
    weight = torch.ones(40)
    weight[::7] = 0
    actual = advantages(rewards_of(8, 5), ids(8, 5), weight, whiten=True, unbiased=unbiased, clip=None, **options)
    kept = actual[weight > 0].double()
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.var(correction=int(unbiased))) == pytest.approx(1.0, rel=1e-5)


def test_reinforce_plus_plus_with_baseline_divides_by_the_std_of_centred_rewards() -> None:
    r = rewards_of(4, 5)
    rest = r.view(4, 5) - r.view(4, 5).mean(1, keepdim=True)
    actual = advantages(r, ids(4, 5), std="none", whiten=True, clip=None)
    np.testing.assert_allclose(actual.numpy(), (rest / rest.std(correction=0)).flatten().numpy(), rtol=1e-5)
    assert not np.allclose(actual.numpy(), advantages(r, ids(4, 5), std="batch", clip=None).numpy(), rtol=0.01)


def test_a_group_of_equal_rewards_stays_zero_when_the_batch_is_whitened() -> None:
    r = torch.tensor([0.1, 0.1, 0.1, 1.0, 2.0, 9.0])
    actual = advantages(r, ids(2, 3), std="none", whiten=True, trim=0.34)  # trimmed: the sum of a group is not 0
    assert actual[:3].tolist() == [0.0, 0.0, 0.0] and actual[3:].abs().min() > 0.1


def test_an_outlier_does_not_change_trimmed_statistics() -> None:
    usual = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    wild = torch.tensor([1.0, 2.0, 3.0, 4.0, 500.0])
    actual = advantages(wild, ids(1, 5), trim=0.2, clip=None)
    assert torch.equal(actual[:4], advantages(usual, ids(1, 5), trim=0.2, clip=None)[:4])
    assert float(actual[4]) == pytest.approx(497 / math.sqrt(2 / 3), rel=1e-5)


def test_one_outlier_among_equal_rewards_has_no_trimmed_std_and_gives_zero() -> None:
    r = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    actual = result(r, ids(1, 5), trim=0.2)
    assert torch.equal(actual.advantages, torch.zeros(5))
    assert values(actual.metrics)["rollout/zero_std_group_ratio"] == 1.0
    assert advantages(r, ids(1, 5), trim=0.2, std="none").tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_an_integer_weight_equals_repeated_rows() -> None:
    r = rewards_of(2, 3)
    weight = torch.tensor([1.0, 3.0, 2.0, 1.0, 1.0, 2.0])
    times = [i for i in range(6) for _ in range(int(weight[i]))]
    for options in ({}, {"std": "batch"}, {"scope": "global"}, {"std": "none", "whiten": True}):
        copied = advantages(r[times], [ids(2, 3)[i] for i in times], **options)
        assert torch.allclose(advantages(r, ids(2, 3), weight, **options)[times], copied, rtol=1e-6)


@pytest.mark.parametrize("options", [{"trim": 0.3}, {"leave_one_out": True}, {"unbiased": True}, {"whiten": True}])
@pytest.mark.parametrize("bad", [1e9, math.nan, math.inf])
def test_rows_of_weight_zero_do_not_change_others_with_any_option(options: dict[str, Any], bad: float) -> None:
    r, weight = rewards_of(2, 5), torch.ones(10)
    weight[3] = 0
    r[3] = bad
    rest = [i for i in range(10) if i != 3]
    actual = advantages(r, ids(2, 5), weight, **options)
    assert actual[3] == 0
    assert torch.equal(actual[rest], advantages(r[rest], [ids(2, 5)[i] for i in rest], **options))


def test_a_step_without_valid_rows_gives_zeros() -> None:
    for options in ({}, {"std": "batch"}, {"whiten": True, "unbiased": True, "leave_one_out": True, "trim": 0.1}):
        actual = result(torch.full((4,), math.nan), ids(2, 2), torch.zeros(4), **options)
        assert torch.equal(actual.advantages, torch.zeros(4)) and torch.equal(actual.weight, torch.zeros(4))
        assert values(actual.metrics)["rollout/zero_std_group_ratio"] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, r"advantage\.clip must be > 0, got 0.0; write null"),
        ({"eps": 0.0}, r"advantage\.eps must be > 0"),
        ({"trim": 0.5}, r"advantage\.trim must lie in \[0, 0\.5\), got 0\.5"),
        ({"combine": "advantages"}, r"needs advantage\.weights"),
        ({"weights": {"ocr": math.inf}}, r"advantage\.weights must be finite.*ocr=inf"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        GroupAdvantage(**options)
    assert raised.value.code == 2004
