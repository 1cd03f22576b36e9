"""How rows are cut into forward batches of equal size, so that a row's bits do not depend on its neighbours.

Matrix kernels pick another order of summation for another number of rows. A batch whose size is always the same (or,
where a family's `batch_multiple` allows it, always a multiple of that) gives every row the same bits, whoever sits
beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.conditions import Conditions


@dataclass(frozen=True)
class PaddedChunk:
    """Row numbers of one forward batch: `num_real` rows of its own, then copies of the first one."""

    rows: tuple[int, ...]
    num_real: int


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def padded_chunks(count: int, size: int, multiple: int = 1) -> list[PaddedChunk]:
    """Rows 0 .. count - 1 as chunks of one size: `size` rounded up to `multiple`; the last is filled with copies."""
    if size < 1:
        raise ValueError(f"a forward batch needs at least 1 row, got {size}")
    chunk_size = round_up(size, multiple)
    return [_padded(range(start, min(start + chunk_size, count)), chunk_size) for start in range(0, count, chunk_size)]


def balanced_chunk_size(count: int, size: int, multiple: int = 1) -> int:
    """The chunk size up to `size` (rounded up to `multiple`) that cuts `count` rows evenly: few copies are needed."""
    chunk_size = round_up(size, multiple)
    num_chunks = max(1, -(-count // chunk_size))
    return round_up(max(1, -(-count // num_chunks)), multiple)


def padded_rows(count: int, multiple: int) -> list[int]:
    """Rows 0 .. count - 1, then copies of row 0 up to the next multiple."""
    return list(_padded(range(count), round_up(count, multiple)).rows)


def _padded(rows: range, size: int) -> PaddedChunk:
    return PaddedChunk(tuple(rows) + (rows.start,) * (size - len(rows)), len(rows))


def select_conditions(conditions: Conditions, rows: list[int]) -> Conditions:
    """The rows `rows` of every condition; the very same object when these are all rows in order."""
    return {name: c if rows == list(range(len(c))) else c.select(rows) for name, c in conditions.items()}


def map_chunks(fn: Callable[[Tensor], Tensor], values: Tensor, size: int, multiple: int = 1) -> Tensor:
    """`fn` over the rows of `values` in full chunks, the copies cut off again."""
    chunks = padded_chunks(len(values), size, multiple)
    return torch.cat([fn(values[list(chunk.rows)])[: chunk.num_real] for chunk in chunks])
