"""Calls are cut by rows into one call per rank, and what comes back stands as it was sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.config.errors import ConfigError
from unirl.distributed.group.dispatch import (
    Dispatch,
    broadcast,
    collect,
    rank0,
    rank_rows,
    remote_methods,
    scatter,
    sent_order,
    split_call,
)
from unirl.testing.toy import toy_request
from unirl.types.batch import concat_rows, take_rows
from unirl.types.primitives import Images, Texts
from unirl.types.rows import RemoteRows, StoredRows

RANKS = st.integers(1, 6)
UPDATES = st.integers(1, 5)
BY_ROWS = Dispatch("scatter", concat_rows, take_rows)
METRICS = Dispatch("scatter", sum)


@given(st.integers(1, 60), UPDATES, RANKS)
def test_every_row_stands_on_some_rank_and_all_ranks_hold_equally_many(num_rows, num_updates, num_ranks) -> None:
    rows = rank_rows(num_rows, num_updates, num_ranks)
    assert len(rows) == num_ranks and len({len(share) for share in rows}) == 1
    standing = [row for share in rows for row in share]
    fill = sorted(standing)[num_rows:]
    assert sorted(set(standing)) == list(range(num_rows))
    assert len(fill) == -num_rows % num_ranks and set(fill) <= {num_rows - 1}


@given(st.integers(1, 6), UPDATES, RANKS)
def test_a_ranks_piece_of_update_u_is_its_share_of_update_u(rows_each, num_updates, num_ranks) -> None:
    size = rows_each * num_ranks
    for rank, rows in enumerate(rank_rows(size * num_updates, num_updates, num_ranks)):
        for u in range(num_updates):
            start = u * size + rank * rows_each
            assert rows[u * rows_each : (u + 1) * rows_each] == list(range(start, start + rows_each))


@given(st.integers(1, 60), UPDATES, RANKS)
def test_the_order_that_was_sent_is_the_inverse_of_the_layout(num_rows, num_updates, num_ranks) -> None:
    rows = rank_rows(num_rows, num_updates, num_ranks)
    joined = [row for share in rows for row in share]
    assert [joined[place] for place in sent_order(rows)] == list(range(num_rows))


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no row layout for 0 rows, 1 updates and 2 ranks"):
        rank_rows(0, 1, 2)


@given(st.integers(1, 40), UPDATES, RANKS)
def test_a_cut_call_comes_back_as_it_was_sent(num_rows, num_updates, num_ranks) -> None:
    texts = Texts(texts=[str(i) for i in range(num_rows)])
    done = split_call("role.echo", BY_ROWS, ((texts,), {}), num_ranks, num_updates)
    assert len(done.calls) == num_ranks
    assert done.merge([args[0] for args, _ in done.calls]).texts == texts.texts


def test_only_rows_are_cut_and_everything_else_goes_to_all_ranks() -> None:
    images = Images(pixels=torch.arange(4.0).view(4, 1, 1, 1))
    table, names, column = torch.arange(4), ["a", "b", "c", "d"], RemoteRows((StoredRows("w", "0/0", (0, 1, 2, 3)),))
    calls = split_call("role.f", METRICS, ((images, table), {"names": names, "column": column}), 2).calls
    for rank, (args, kwargs) in enumerate(calls):
        assert args[0].pixels.flatten().tolist() == [2.0 * rank, 2.0 * rank + 1]
        assert args[1] is table and kwargs["names"] is names
        assert kwargs["column"].stored[0].rows == (2 * rank, 2 * rank + 1)


def test_a_cut_argument_does_not_carry_the_rows_of_other_ranks() -> None:
    images = Images(pixels=torch.zeros(8, 3, 4, 4))
    (args, _), *_ = split_call("role.f", METRICS, ((images,), {}), 4).calls
    assert args[0].pixels.untyped_storage().nbytes() == images.pixels.untyped_storage().nbytes() // 4


def test_arguments_of_unequal_length_are_named() -> None:
    call = ((toy_request(prompts=1),), {"texts": Texts(texts=["a"])})
    with pytest.raises(ValueError, match=r"score needs .* argument 1 \(RolloutReq\) has 4, texts \(Texts\) has 1 rows"):
        split_call("reward.score", BY_ROWS, call, 1)


def test_a_scattered_call_without_rows_needs_one_rank() -> None:
    assert split_call("role.f", METRICS, ((3,), {}), 1).calls == (((3,), {}),)
    with pytest.raises(TypeError, match=r"role.f is scattered over 2 ranks, but no argument has rows"):
        split_call("role.f", METRICS, ((3,), {}), 2)


def test_a_call_with_no_rows_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"role.f got no rows: argument 1 \(Texts\) is empty"):
        split_call("role.f", BY_ROWS, ((Texts(texts=[]),), {}), 2)


def test_a_result_that_has_no_rows_admits_no_fill() -> None:
    with pytest.raises(ConfigError, match=r"stack.train got 3 rows for 2 workers") as refused:
        split_call("stack.train", METRICS, ((Texts(texts=["a", "b", "c"]),), {}), 2)
    assert refused.value.code == 2010


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(1, 3), (2, 4)])
def test_an_answer_that_lacks_rows_is_refused(num_ranks, num_rows) -> None:
    done = split_call("rollout.generate", BY_ROWS, ((Texts(texts=["a", "b", "c"]),), {}), num_ranks)
    with pytest.raises(ValueError, match=f"rollout.generate returned {num_ranks} rows for {num_rows}"):
        done.merge([Texts(texts=["a"])] * num_ranks)


class Role:
    @scatter(concat_rows, order=take_rows)
    def rows(self) -> None: ...

    @broadcast
    def everywhere(self) -> None: ...

    @rank0
    def once(self) -> None: ...

    @collect
    def each(self) -> None: ...

    def private(self) -> None: ...


class Override(Role):
    def once(self) -> None: ...


@pytest.mark.parametrize(
    ("method", "num_calls", "merged"), [("everywhere", 3, "r0"), ("once", 1, "r0"), ("each", 3, ["r0", "r1", "r2"])]
)
def test_unscattered_calls_reach_the_ranks_that_their_mark_says(method, num_calls, merged) -> None:
    done = split_call(f"role.{method}", remote_methods(Role)[method], (("x",), {}), 3)
    assert done.calls == ((("x",), {}),) * num_calls
    assert done.merge([f"r{rank}" for rank in range(num_calls)]) == merged


def test_an_override_keeps_the_mark_and_unmarked_methods_have_none() -> None:
    assert set(remote_methods(Override)) == {"rows", "everywhere", "once", "each"}
    assert remote_methods(Override)["once"].mode == "rank0"
