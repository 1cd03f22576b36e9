"""Group advantages against their algebra."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms.advantages import GroupAdvantage
from unirl.config.errors import ConfigError, RewardError
from unirl.types.results import values


def ids(groups: int, size: int) -> list[str]:
    return [f"p{g}@0" for g in range(groups) for _ in range(size)]


def rewards_of(groups: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(groups * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advantages(rewards: Tensor, group_ids: list[str], weight: Tensor | None = None, **options: Any) -> Tensor:
    weight = torch.ones(len(rewards)) if weight is None else weight
    return GroupAdvantage(**options)(rewards, group_ids, weight).advantages


@settings(deadline=None)
@given(groups=st.integers(1, 4), size=st.integers(2, 9), seed=st.integers(0, 99))
def test_own_std_gives_sum_zero_and_sum_of_squares_n_per_group(groups: int, size: int, seed: int) -> None:
    rewards = rewards_of(groups, size, seed)
    found = advantages(rewards, ids(groups, size), clip=None).double().view(groups, size)
    assert found.sum(1).abs().max() < 1e-5 * size
    std = rewards.double().view(groups, size).std(dim=1, correction=0)
    expected = size * (std / (std + 1e-6)).square()  # n, but for eps where a group's rewards hardly differ
    assert torch.allclose(found.square().sum(1), expected, rtol=1e-4)


def test_it_is_the_papers_formula_with_population_std_and_eps_outside_the_root() -> None:
    r = rewards_of(3, 5).numpy().reshape(3, 5)
    centred = r - r.mean(1, keepdims=True)
    for std, divisor in (
        ("group", r.std(1, keepdims=True) + 0.1),
        ("batch", r.std() + 0.1),
        ("none", 1.0),
    ):
        found = advantages(torch.tensor(r).flatten(), ids(3, 5), std=std, eps=0.1).numpy().reshape(3, 5)
        np.testing.assert_allclose(found, centred / divisor, rtol=1e-6)
    found = advantages(torch.tensor(r).flatten(), ids(3, 5), scope="global", eps=0.1).numpy().reshape(3, 5)
    np.testing.assert_allclose(found, (r - r.mean()) / (r.std() + 0.1), rtol=1e-6)


def test_an_affine_change_of_the_rewards_changes_no_advantage() -> None:
    r = rewards_of(2, 6)
    plain = advantages(r, ids(2, 6), eps=1e-12)
    assert torch.allclose(plain, advantages(7 * r - 3, ids(2, 6), eps=1e-12), rtol=1e-6)


def test_one_hot_rewards_reach_the_root_of_n_minus_one_and_the_clip_bounds_them() -> None:
    r = torch.zeros(24)
    r[5] = 1
    assert float(advantages(r, ids(1, 24)).max()) == pytest.approx(math.sqrt(23), rel=1e-4)
    wide = torch.zeros(48)
    wide[5] = 1
    found = advantages(wide, ids(1, 48))
    assert float(found.max()) == 5.0
    assert float(advantages(wide, ids(1, 48), clip=None).max()) == pytest.approx(math.sqrt(47), rel=1e-4)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_that_float32_cannot_represent_give_exactly_zero(std: str) -> None:
    r = torch.full((12,), 0.1)
    naive = (r - r.mean()) / (r.std() + 1e-8)
    assert naive.abs().min() > 0.1  # the hazard: round-off over round-off, with one sign for the whole group
    result = GroupAdvantage(std=std)(torch.cat([r, rewards_of(1, 12).float()]), ids(2, 12), torch.ones(24))
    assert torch.equal(result.advantages[:12], torch.zeros(12))
    assert result.advantages[12:].abs().min() > 0
    assert values(result.metrics)["rollout/zero_std_group_ratio"] == 0.5


def test_rewards_that_differ_by_round_off_are_dead() -> None:
    r = torch.tensor([0.1, 0.1, 0.1, 0.1]) * torch.tensor([1.0, 1 + 1.2e-7, 1.0, 1 - 6e-8])
    assert torch.equal(advantages(r, ids(1, 4)), torch.zeros(4))
    assert advantages(torch.tensor([1e-8, 2e-8]), ids(1, 2), eps=1e-12).abs().min() > 0.9


def test_all_groups_dead_gives_zeros_and_no_division() -> None:
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
    found = advantages(r, ids(2, 4), weight, std=std)
    rest = [0, 1, 2, 4, 5, 6, 7]
    alone = advantages(r[rest], [ids(2, 4)[i] for i in rest], std=std)
    assert found[3] == 0 and torch.equal(found[rest], alone)


def test_a_group_without_a_row_that_counts_is_not_a_dead_group() -> None:
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    result = GroupAdvantage()(torch.tensor([0.0, 1.0, 5.0, 5.0]), ids(2, 2), weight)
    assert values(result.metrics)["rollout/zero_std_group_ratio"] == 0.0
    assert values(result.metrics)["rollout/adv_abs_mean"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_names_row_and_group(bad: float) -> None:
    r = torch.tensor([0.0, 1.0, bad, 1.0])
    with pytest.raises(RewardError, match=r"row 2 \(group 'p1@0'\)") as raised:
        advantages(r, ids(2, 2))
    assert raised.value.code == 6003


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantage\.clip"):
        GroupAdvantage(clip=0.0)
    with pytest.raises(ConfigError, match=r"advantage\.eps"):
        GroupAdvantage(eps=0.0)
