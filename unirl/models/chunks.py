"""Splits rows into forward batches of equal size, so that the bits of a row do not depend on the other rows.

Matrix kernels choose their order of summation by the number of rows. If a batch always has the same size (or always a
multiple of the family's `batch_multiple`), a row has the same bits whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.conditions import Conditions


@dataclass(frozen=True)
class PaddedChunk:
    """The row numbers of one forward batch: `num_real` rows, then copies of the first of them as padding."""

    rows: tuple[int, ...]
    num_real: int


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def padded_chunks(count: int, size: int, multiple: int = 1) -> list[PaddedChunk]:
    """Chunks of rows 0 .. count - 1, all of `size` rounded up to `multiple`. The last one is padded with copies."""
    if size < 1:
        raise ValueError(f"a forward batch needs at least 1 row, got {size}")
    chunk_size = round_up(size, multiple)
    return [_padded(range(start, min(start + chunk_size, count)), chunk_size) for start in range(0, count, chunk_size)]


def balanced_chunk_size(count: int, size: int, multiple: int = 1) -> int:
    """The chunk size, at most `size` rounded up to `multiple`, that splits `count` rows evenly with little padding."""
    chunk_size = round_up(size, multiple)
    num_chunks = max(1, -(-count // chunk_size))
    return round_up(max(1, -(-count // num_chunks)), multiple)


def padded_rows(count: int, multiple: int) -> list[int]:
    """Rows 0 .. count - 1, then copies of row 0 as padding up to the next multiple."""
    return list(_padded(range(count), round_up(count, multiple)).rows)


def _padded(rows: range, size: int) -> PaddedChunk:
    return PaddedChunk(tuple(rows) + (rows.start,) * (size - len(rows)), len(rows))


def select_conditions(conditions: Conditions, rows: list[int]) -> Conditions:
    """The rows `rows` of every condition. A condition of which all rows are selected in order is returned as it is."""
    return {name: c if rows == list(range(len(c))) else c.select(rows) for name, c in conditions.items()}


def map_chunks(fn: Callable[[Tensor], Tensor], values: Tensor, size: int, multiple: int = 1) -> Tensor:
    """Apply `fn` to the rows of `values` in padded chunks, and remove the padding from the results."""
    chunks = padded_chunks(len(values), size, multiple)
    return torch.cat([fn(values[list(chunk.rows)])[: chunk.num_real] for chunk in chunks])
