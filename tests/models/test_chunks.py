"""Every row is in exactly one chunk, all chunks are of one size, and copies never count."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.models.chunks import balanced_chunk_size, map_chunks, padded_chunks, padded_rows, rows_are_independent

COUNTS = st.integers(0, 60)
SIZES = st.integers(1, 20)
MULTIPLES = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None)
@given(COUNTS, SIZES, MULTIPLES)
def test_chunks_cover_the_rows_once_and_are_of_one_size(count: int, size: int, multiple: int) -> None:
    chunks = padded_chunks(count, size, multiple)
    assert [row for chunk in chunks for row in chunk.rows[: chunk.num_real]] == list(range(count))
    assert {len(chunk.rows) for chunk in chunks} <= {-(-size // multiple) * multiple}
    assert all(set(chunk.rows[chunk.num_real :]) <= set(chunk.rows[: chunk.num_real]) for chunk in chunks)


@settings(deadline=None)
@given(st.integers(1, 60), SIZES, MULTIPLES)
def test_an_even_size_needs_no_more_chunks_and_fewer_copies(count: int, size: int, multiple: int) -> None:
    even = balanced_chunk_size(count, size, multiple)
    assert even <= -(-size // multiple) * multiple
    wanted, result = padded_chunks(count, size, multiple), padded_chunks(count, even, multiple)
    assert len(result) <= len(wanted)
    assert sum(len(chunk.rows) for chunk in result) <= sum(len(chunk.rows) for chunk in wanted)
    assert sum(len(chunk.rows) - chunk.num_real for chunk in result) < len(result) * multiple


@settings(deadline=None)
@given(st.integers(1, 30), SIZES, MULTIPLES)
def test_mapping_in_chunks_is_mapping_at_once(count: int, size: int, multiple: int) -> None:
    values = torch.arange(count * 2).view(count, 2)
    assert torch.equal(map_chunks(lambda v: v * 2, values, size, multiple), values * 2)


@settings(deadline=None)
@given(st.integers(1, 30), MULTIPLES)
def test_filling_adds_copies_of_the_first_row_up_to_the_multiple(count: int, multiple: int) -> None:
    rows = padded_rows(count, multiple)
    assert rows[:count] == list(range(count)) and set(rows[count:]) <= {0}
    assert len(rows) % multiple == 0 and len(rows) - count < multiple


def test_a_row_of_a_matrix_product_has_the_same_bits_in_batches_of_any_multiple_of_four() -> None:
    assert rows_are_independent()
