"""The rank that this code runs on, from a context instead of environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.types.device import CPU, accelerator, device_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The rank of a worker in its role. `dp` counts the ranks with distinct rows."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: torch.device = CPU
    group: ProcessGroup | None = None
    """The default process group of the role's ranks; None when there is one rank."""

    def sum_over_dp(self, value: float) -> float:
        """The sum of `value` over the data-parallel ranks, in float64."""
        return float(self.total_over_dp(torch.tensor(value, dtype=torch.float64)))

    def total_over_dp(self, values: Tensor) -> Tensor:
        """The sum of `values`, on the CPU, over the data-parallel ranks, elementwise in float64."""
        total = values.double()
        if self.dp_size > 1:
            total = total.clone()
            torch.distributed.all_reduce(total, group=self.group)
        return total

    def max_over_dp(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value over the data-parallel ranks. All ranks pass equally many values."""
        if self.dp_size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def free_unused(self) -> None:
        """Return the cached device memory of this process to the device, for other processes."""
        module = device_module(self.device)
        if module is not None:
            module.empty_cache()


_RANK: ContextVar[RankInfo] = ContextVar("rank", default=RankInfo())  # noqa: B039 - frozen


def current() -> RankInfo:
    """The rank of the role whose method is running."""
    return _RANK.get()


def own_device() -> torch.device:
    """The device of the role whose method is running; outside of any role, the first accelerator or the CPU."""
    rank = _RANK.get(None)
    return accelerator() if rank is None else rank.device


@contextmanager
def running_as(rank: RankInfo) -> Iterator[None]:
    """Make `rank` the current rank inside the block."""
    token = _RANK.set(rank)
    try:
        yield
    finally:
        _RANK.reset(token)
