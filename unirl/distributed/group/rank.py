"""Which rank this code runs on, from a context instead of environment variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The place of a worker in its role. `dp` counts ranks with distinct rows."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def sum_over_dp(self, value: float) -> float:
        """The sum of `value` over the data-parallel ranks."""
        if self.dp_size != 1:
            raise AssertionError("a role with several data-parallel ranks needs a process group")
        return value


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
