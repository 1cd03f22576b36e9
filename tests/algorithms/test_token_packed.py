"""Sums within packed rows against loops, and the rules of aggregation against each other."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms.shared.packed import RowOffsets, token_count, token_shares

Row = list[tuple[float, bool]]
ROWS = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=6), min_size=1, max_size=5)


def packed(rows: list[Row], live: list[bool] | None = None) -> tuple[RowOffsets, Tensor]:
    values = torch.tensor([value for row in rows for value, _ in row], dtype=torch.float64)
    mask = torch.tensor([kept for row in rows for _, kept in row], dtype=torch.bool)
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    return RowOffsets.of(offsets, mask, torch.tensor(live or [True] * len(rows))), values


def kept(row: Row) -> list[float]:
    return [value for value, counts in row if counts]


def close(have: Tensor, want: list[float]) -> bool:
    return torch.allclose(have, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(deadline=None)
@given(ROWS)
def test_sums_means_and_lengths_use_counted_tokens_only(rows: list[Row]) -> None:
    packing, values = packed(rows)
    assert packing.lengths.tolist() == [len(kept(row)) for row in rows]
    assert close(packing.sum(values), [sum(kept(row)) for row in rows])
    assert close(packing.mean(values), [sum(kept(row)) / max(len(kept(row)), 1) for row in rows])


@settings(deadline=None)
@given(ROWS)
def test_running_sums_stay_within_their_row(rows: list[Row]) -> None:
    packing, values = packed(rows)
    before = [sum(kept(row[:t])) for row in rows for t in range(len(row))]
    rest = [sum(kept(row)) - sum(kept(row[:t])) for row in rows for t in range(len(row))]
    assert close(packing.before(values), before)
    assert close(packing.rest(values), rest)
    firsts = [t for t, start in enumerate(b == 0 for row in rows for b in range(len(row))) if start]
    assert not packing.before(values)[firsts].any()  # exactly 0, whatever the rows before


@settings(deadline=None)
@given(ROWS, st.floats(0, 1))
def test_quantiles_are_those_of_torch_row_by_row(rows: list[Row], q: float) -> None:
    packing, values = packed(rows)
    want = [float(torch.tensor(kept(row), dtype=torch.float64).quantile(q)) if kept(row) else 0.0 for row in rows]
    assert close(packing.quantile(values, q), want)


def test_a_row_of_weight_zero_has_no_counted_token() -> None:
    packing, values = packed([[(1.0, True), (2.0, True)], [(4.0, True)]], [False, True])
    assert packing.lengths.tolist() == [0, 1] and packing.sum(values).tolist() == [0.0, 4.0]


def test_masked_values_are_0_at_uncounted_tokens_and_have_no_gradient_there() -> None:
    packing, _ = packed([[(1.0, True), (2.0, False)]])
    values = torch.tensor([3.0, torch.nan], requires_grad=True)
    result = packing.masked(values)
    result.sum().backward()
    assert result.tolist() == [3.0, 0.0] and values.grad.tolist() == [1.0, 0.0]


# Aggregation


def aggregated(rows: list[Row], rule: Any, horizon: int | None = None) -> float:
    packing, losses = packed(rows)
    weight = torch.ones(len(rows))
    shares = token_shares(rule, packing, weight, horizon)
    return float((shares * losses).sum() / token_count(rule, packing, weight))


RAGGED: list[Row] = [[(1.0, True)], [(2.0, True), (100.0, False), (4.0, True), (9.0, True)], [(50.0, False)]]


@pytest.mark.parametrize(
    ("rule", "horizon", "expected"),
    [
        ("token-mean", None, (1 + 2 + 4 + 9) / 4),
        ("seq-mean-token-mean", None, (1 + 5 + 0) / 3),
        ("seq-mean-token-sum", None, (1 + 15 + 0) / 3),
        ("seq-mean-token-sum-norm", 8, (1 + 15 + 0) / 3 / 8),
    ],
)
def test_each_aggregation_equals_its_definition(rule: str, horizon: int | None, expected: float) -> None:
    assert aggregated(RAGGED, rule, horizon) == pytest.approx(expected, rel=1e-15)


def test_rows_of_equal_length_have_one_mean_and_a_horizon_of_that_length_gives_it_too() -> None:
    rows: list[Row] = [[(float(i * t), True) for t in range(5)] for i in range(3)]
    wanted = aggregated(rows, "token-mean")
    assert aggregated(rows, "seq-mean-token-mean") == pytest.approx(wanted, rel=1e-15)
    assert aggregated(rows, "seq-mean-token-sum-norm", 5) == pytest.approx(wanted, rel=1e-15)
