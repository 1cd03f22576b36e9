"""Per-row values in the form that travels fast between processes: arrays of bytes.

Ray writes a tensor into its pickle stream, byte by byte twice over, and an array beside it (67 MB from worker to worker
on one machine: 0.50 s and 0.026 s).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.types.batch import map_value


@dataclass(frozen=True)
class Packed:
    """A tensor's memory, and how to read it."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory, flat, as numbers that every backend can send."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@singledispatch
def pack(value: Any) -> Any:
    """A per-row value with its tensors on the CPU; alone or in mappings, they become arrays."""
    return map_value(value, Tensor.cpu)


@pack.register
def _(value: Tensor) -> Packed:
    return Packed(as_bytes(value.detach().cpu()).numpy(), value.dtype, tuple(value.shape))


@pack.register
def _(value: dict) -> Any:
    return {name: pack(entry) for name, entry in value.items()}


@singledispatch
def unpack(value: Any) -> Any:
    """The inverse of `pack`, on the CPU."""
    return value


@unpack.register
def _(value: Packed) -> Tensor:
    # Copied: an array from the object store is read-only and keeps the store's memory.
    tensor = torch.empty(value.shape, dtype=value.dtype)
    as_bytes(tensor).numpy()[:] = value.data
    return tensor


@unpack.register
def _(value: dict) -> Any:
    return {name: unpack(entry) for name, entry in value.items()}
