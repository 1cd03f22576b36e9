"""Tensors packed into flat byte buffers, so that a transfer consists of few large messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unirl.config.errors import SyncError
from unirl.distributed.weight_sync.base import TransferConfig, WeightLayout

ALIGNMENT = 16
"""Bytes; every tensor starts at a multiple of it, so that it can be viewed in its own dtype."""


@dataclass(frozen=True)
class BucketEntry:
    """The position of one tensor in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class BucketPlan:
    """The entries of one bucket."""

    entries: tuple[BucketEntry, ...]
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors of a transfer. Buckets of one transfer are numbered from 0."""

    version: int
    weights: str
    number: int
    entries: tuple[BucketEntry, ...]
    data: Tensor  # [bytes] uint8

    def values(self, entry: BucketEntry) -> Tensor:
        """One tensor, as a view of the buffer. Raises SyncError when the buffer is too short."""
        end = entry.offset + entry.num_bytes
        if end > self.data.numel():
            raise SyncError(
                f"bucket {self.number} of version {self.version} was cut short: {entry.name!r} ends at byte {end}, and "
                f"{self.data.numel()} bytes arrived"
            )
        return self.data[entry.offset : end].view(entry.dtype).view(entry.shape)

    def __reduce__(self) -> tuple[object, ...]:
        """The bytes are pickled as an array, which Ray stores without a copy in the pickle."""
        return _from_array, (self.version, self.weights, self.number, self.entries, self.data.cpu().numpy())


def _from_array(version: int, weights: str, number: int, entries: tuple[BucketEntry, ...], data: np.ndarray) -> Bucket:
    # Copied, because an array from the object store is read-only.
    return Bucket(version, weights, number, entries, torch.from_numpy(data.copy()))


def plan_buckets(layout: WeightLayout, config: TransferConfig) -> list[BucketPlan]:
    """Distribute the layout's tensors, in order, over buckets of at most `config.bucket_bytes`.

    A larger tensor gets its own bucket.
    """
    plans: list[BucketPlan] = []
    entries: list[BucketEntry] = []
    size = 0
    for name, info in layout.tensors.items():
        entry = BucketEntry(name, config.wire(name), info.shape, size)
        if entries and size + entry.num_bytes > config.bucket_bytes:
            plans.append(BucketPlan(tuple(entries), size))
            entries, entry = [], BucketEntry(name, entry.dtype, entry.shape, 0)
        entries.append(entry)
        size = -(-(entry.offset + entry.num_bytes) // ALIGNMENT) * ALIGNMENT
    return [*plans, BucketPlan(tuple(entries), size)] if entries else plans


def fill(plan: BucketPlan, tensors: Iterator[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """The buffer [bytes] of a bucket. Tensors are taken from `tensors` one by one and cast into it.

    Raises:
        SyncError: naming the tensor, when `tensors` yields another one than the plan expects.
    """
    data = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
    for entry in plan.entries:
        name, tensor = next(tensors, (None, None))
        if name != entry.name or tensor is None or tuple(tensor.shape) != entry.shape:
            actual = "nothing" if tensor is None else f"{name!r} {list(tensor.shape)}"
            raise SyncError(
                f"the trainer announced {entry.name!r} {list(entry.shape)} and then sent {actual} in its place: its "
                "named_tensors must give the same tensors in the same order each time"
            )
        view = data[entry.offset : entry.offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
        view.copy_(tensor.detach())
    return data


def filled(
    plans: Sequence[BucketPlan], tensors: Iterator[tuple[str, Tensor]], version: int, weights: str, device: torch.device
) -> Iterator[Bucket]:
    """The buckets of one transfer. Raises SyncError when `tensors` yields others than planned."""
    for number, plan in enumerate(plans):
        yield Bucket(version, weights, number, plan.entries, fill(plan, tensors, device))
    surplus = next(tensors, None)
    if surplus is not None:
        raise SyncError(f"the trainer sent {surplus[0]!r}, which it had not announced")
