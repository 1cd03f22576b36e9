"""Micro-batches by cost: whole rows, a budget that holds, and as many pieces as asked for."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.train.stack import Micro, as_many, within_budget

TOGETHER = st.integers(1, 3)
BUNDLES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def costs_of(bundles: list[int], together: int) -> list[int]:
    return [cost for cost in bundles for _ in range(together)]


def cost(micro: Micro, costs: list[int]) -> int:
    return sum(costs[row] for row in micro.rows)


@given(BUNDLES, TOGETHER, st.integers(1, 80))
def test_every_row_is_in_one_micro_batch_and_only_a_lone_bundle_exceeds_the_budget(bundles, together, budget) -> None:
    costs = costs_of(bundles, together)
    micros = within_budget(costs, budget, together)
    assert sorted(chain.from_iterable(micro.rows for micro in micros)) == list(range(len(costs)))
    for micro in micros:
        assert len(micro.rows) == together or cost(micro, costs) <= budget
        starts = micro.rows[::together]
        assert all(start % together == 0 for start in starts)
        assert list(micro.rows) == [start + i for start in starts for i in range(together)]


@given(BUNDLES, st.integers(1, 80))
def test_no_two_micro_batches_would_fit_into_one(bundles, budget) -> None:
    totals = sorted(cost(micro, bundles) for micro in within_budget(bundles, budget, 1))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


@given(BUNDLES, TOGETHER, st.integers(1, 80), st.integers(0, 30))
def test_more_micro_batches_hold_the_same_rows_and_fill_only_where_nothing_can_be_cut(
    bundles, together, budget, more
) -> None:
    costs = costs_of(bundles, together)
    micros = within_budget(costs, budget, together)
    pieces = as_many(micros, len(micros) + more, costs, together)
    assert len(pieces) == len(micros) + more
    own = [piece for piece in pieces if not piece.is_fill]
    assert sorted(chain.from_iterable(piece.rows for piece in own)) == list(range(len(costs)))
    assert all(len(piece.rows) % together == 0 for piece in pieces)
    if len(own) < len(pieces):
        assert all(len(piece.rows) == together for piece in pieces)
        fill = [piece for piece in pieces if piece.is_fill]
        assert all(cost(piece, costs) == min(cost(each, costs) for each in own) for piece in fill)


@pytest.mark.parametrize(("costs", "sizes"), [([7, 1, 1, 1], [1, 3]), ([3, 3, 3, 3], [2, 2]), ([9, 9], [1, 1])])
def test_rows_are_laid_together_as_the_budget_allows(costs, sizes) -> None:
    assert [len(micro.rows) for micro in within_budget(costs, 7, 1)] == sizes
