"""Which rank this code runs on, from a context instead of environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The place of a worker in its role. `dp` counts ranks with distinct rows."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: torch.device = CPU
    group: ProcessGroup | None = None
    """The default process group of the role's ranks; None when alone."""

    def sum_over_dp(self, value: float) -> float:
        """The sum of `value` over the data-parallel ranks, in float64."""
        if self.dp_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.group)
        return float(total)

    def max_over_dp(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the data-parallel ranks, which all bring as many."""
        if self.dp_size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def free_unused(self) -> None:
        """Give memory that this process keeps for later back to the device, where other processes need it now."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


_ALONE = RankInfo()
_RANK: ContextVar[RankInfo] = ContextVar("rank", default=_ALONE)


def current() -> RankInfo:
    """The rank of the role that is running."""
    return _RANK.get()


@contextmanager
def running_as(rank: RankInfo) -> Iterator[None]:
    """Run role code as `rank`."""
    token = _RANK.set(rank)
    try:
        yield
    finally:
        _RANK.reset(token)
