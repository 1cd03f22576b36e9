"""Which rank this code runs on, from a context instead of environment variables."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

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


_HOSTED: list[dist.TCPStore] = []
"""The store that this process hosts for the group it is in."""


def host_store(host: str) -> tuple[str, int]:
    """Open the store in which ranks find each other, reachable at `host` and nowhere else; gives its address."""
    store = open_store(host)
    _HOSTED.append(store)
    return host, store.port


def open_store(host: str) -> dist.TCPStore:
    """A store on a free port of `host`, for as long as the caller holds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def new_process_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A process group beside the default one, for messages of our own: NCCL between GPUs, else gloo."""
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def join_process_group(
    name: str, host: str, port: int, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """The process group `name`, once all of its ranks have joined. Collectives give up after `timeout_s` seconds."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def leave_process_group() -> None:
    """Leave the group and close the store, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _HOSTED.clear()
