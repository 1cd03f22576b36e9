"""Splits rows into forward batches of equal size, so that the bits of a row do not depend on the other rows.

Matrix kernels choose their order of summation by the number of rows. If a batch always has the same size (or always a
multiple of the family's `batch_multiple`), a row has the same bits whatever the other rows are. On x86 CPUs this needs
MKL's strict mode, which `unirl/__init__.py` asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.batch import take_rows
from unirl.types.conditions import Conditions
from unirl.types.progress import progress


@dataclass(frozen=True)
class PaddedChunk:
    """The row numbers of one forward batch: `num_real` rows, then copies of the first of them as padding."""

    rows: tuple[int, ...]
    num_real: int


def batch_multiple(device: torch.device) -> int:
    """Forward batches are padded to a multiple of this: on a CPU, a row has the same bits in any multiple of 4."""
    return 4 if device.type == "cpu" else 1


def rows_are_independent(sizes: Sequence[int] = (32, 128, 512), num_rows: int = 64) -> bool:
    """Whether a row of a matrix product has the same bits in all batches of this CPU whose sizes are multiples of 4.

    It is measured, since it depends on the CPU, on torch's BLAS library and on MKL_CBWR.
    """
    generator = torch.Generator().manual_seed(0)
    for width, height in itertools.product(sizes, repeat=2):
        x, weight = (torch.randn(count, width, generator=generator) for count in (num_rows, height))
        bias = torch.randn(height, generator=generator)
        whole = torch.nn.functional.linear(x, weight, bias)
        for size in (4, 8, 12, num_rows // 2):
            parts = [torch.nn.functional.linear(part, weight, bias) for part in x.split(size)]
            if not torch.equal(torch.cat(parts), whole):
                return False
    return True


def text_multiple(device: torch.device) -> int | None:
    """Masked texts of a request are padded to its longest one, rounded up to a multiple of this number of tokens.

    None on a CPU, where texts keep their padding: the bits of a row would depend on the longest text of its request.
    """
    return None if device.type == "cpu" else 64


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def padded_chunks(count: int, size: int, multiple: int = 1) -> list[PaddedChunk]:
    """Chunks of rows 0 .. count - 1, all of `size` rounded up to `multiple`. The last one is padded with copies."""
    if size < 1:
        raise ValueError(f"a forward batch needs at least 1 row, got {size}")
    chunk_size = round_up(size, multiple)
    chunks = []
    for start in range(0, count, chunk_size):
        rows = range(start, min(start + chunk_size, count))
        chunks.append(PaddedChunk((*rows, *[start] * (chunk_size - len(rows))), len(rows)))
    return chunks


def balanced_chunk_size(count: int, size: int, multiple: int = 1) -> int:
    """The chunk size, at most `size` rounded up to `multiple`, that splits `count` rows evenly with little padding."""
    chunk_size = round_up(size, multiple)
    num_chunks = max(1, -(-count // chunk_size))
    return round_up(max(1, -(-count // num_chunks)), multiple)


def padded_rows(count: int, multiple: int) -> list[int]:
    """Rows 0 .. count - 1, then copies of row 0 as padding up to the next multiple."""
    return [*range(count), *[0] * (round_up(count, multiple) - count)]


def select_conditions(conditions: Conditions, rows: list[int]) -> Conditions:
    """The rows `rows` of every condition. A condition of which all rows are selected in order is returned as it is."""
    return {name: c if rows == list(range(len(c))) else c.select(rows) for name, c in conditions.items()}


def map_chunks(fn: Callable[[Tensor], Tensor], values: Tensor, size: int, multiple: int = 1) -> Tensor:
    """Apply `fn` to the rows of `values` in padded chunks, and remove the padding from the results."""
    chunks = padded_chunks(len(values), size, multiple)
    results = []
    for chunk in chunks:
        results.append(fn(take_rows(values, chunk.rows))[: chunk.num_real])
        progress("chunk of rows", len(chunks))
    return torch.cat(results)
