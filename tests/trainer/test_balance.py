"""Rows dealt to ranks: equal counts, nearly equal work, and nothing else changed."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tokens import token_stage, token_track
from unirl.distributed.group.dispatch import rank_rows
from unirl.testing.toy import toy_stage, toy_track
from unirl.trainer.balance import balanced_order, balanced_track


def loads(order: list[int], costs: list[int], num_updates: int, num_ranks: int) -> list[list[int]]:
    """The work of each rank, update by update, as the layout cuts the rows."""
    shares = rank_rows(len(order), num_updates, num_ranks)
    size = len(order) // (num_updates * num_ranks)
    return [
        [sum(costs[order[place]] for place in share[u * size : (u + 1) * size]) for share in shares]
        for u in range(num_updates)
    ]


def skewed(seed: int, count: int) -> list[int]:
    """Lengths as responses have them: many short ones, a few at the limit; siblings resemble each other."""
    rng = random.Random(seed)
    means = [rng.lognormvariate(5, 1) for _ in range(count // 8)]
    return [min(int(rng.lognormvariate(0, 0.4) * mean) + 1, 2048) for mean in means for _ in range(8)]


def test_on_skewed_lengths_every_rank_has_nearly_the_mean() -> None:
    for seed in range(20):
        costs = skewed(seed, 128)
        order = balanced_order(costs, 2, 4)
        for have, plain in zip(loads(order, costs, 2, 4), loads(list(range(128)), costs, 2, 4), strict=True):
            mean = sum(have) / 4
            assert max(have) / mean < 1.02 < max(plain) / mean


COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(1, 4))


@given(COUNTS, st.data())
def test_an_order_is_a_permutation_inside_updates_that_keeps_bundles_and_never_makes_it_worse(counts, data) -> None:
    num_updates, num_ranks, together, share = counts
    size = num_ranks * together * share
    costs = data.draw(st.lists(st.integers(0, 50), min_size=size * num_updates, max_size=size * num_updates))
    order = balanced_order(costs, num_updates, num_ranks, together)
    for u in range(num_updates):
        assert sorted(order[u * size : (u + 1) * size]) == list(range(u * size, (u + 1) * size))
    for start in range(0, len(order), together):
        assert order[start] % together == 0
        assert order[start : start + together] == list(range(order[start], order[start] + together))
    plain = loads(list(range(len(order))), costs, num_updates, num_ranks)
    for have, stood in zip(loads(order, costs, num_updates, num_ranks), plain, strict=True):
        assert max(have) <= max(stood)
    assert order == balanced_order(costs, num_updates, num_ranks, together)


def test_equal_costs_stay_where_they_are() -> None:
    assert balanced_order([5] * 24, 2, 3) == list(range(24))


def test_one_rank_and_rows_without_costs_are_left_alone() -> None:
    text, image = token_track(token_stage(), prompts=4), toy_track(toy_stage(), prompts=2)
    assert balanced_track(text, 1, 1) is text
    assert balanced_track(image, 1, 2) is image


def test_a_track_is_dealt_by_its_tokens_with_everything_that_belongs_to_a_row() -> None:
    track = token_track(token_stage(), prompts=4)
    dealt = balanced_track(track, 1, 2)
    where = [track.sample_ids.index(sample) for sample in dealt.sample_ids]
    assert sorted(where) == list(range(16)) and where != list(range(16))
    assert torch.equal(dealt.segment.lengths, track.segment.lengths[where])
    assert torch.equal(dealt.advantages, track.advantages[where])
    halves = dealt.segment.lengths.view(2, 8).sum(1)
    assert abs(int(halves[0] - halves[1])) <= 1
