"""The rank that this code runs on, from a context instead of environment variables, and process groups of ranks."""

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
        if self.dp_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.group)
        return float(total)

    def max_over_dp(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value over the data-parallel ranks. All ranks pass equally many values."""
        if self.dp_size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def free_unused(self) -> None:
        """Return the cached device memory of this process to the device, for other processes."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


_ALONE = RankInfo()
_RANK: ContextVar[RankInfo] = ContextVar("rank", default=_ALONE)


def current() -> RankInfo:
    """The rank of the role whose method is running."""
    return _RANK.get()


@contextmanager
def running_as(rank: RankInfo) -> Iterator[None]:
    """Make `rank` the current rank inside the block."""
    token = _RANK.set(rank)
    try:
        yield
    finally:
        _RANK.reset(token)


_HOSTED: list[dist.TCPStore] = []
"""The store that this process hosts for its group. A reference keeps it open."""


def host_store(host: str) -> tuple[str, int]:
    """Open the store in which ranks find each other, on the address `host` only. Returns host and port."""
    store = open_store(host)
    _HOSTED.append(store)
    return host, store.port


def open_store(host: str) -> dist.TCPStore:
    """Open a store on a free port of `host`. It stays open as long as the caller holds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def new_process_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Create a process group beside the default one: NCCL between GPUs, else gloo."""
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def join_process_group(
    name: str, host: str, port: int, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """Join the process group `name`. Returns when all ranks have joined; collectives time out after `timeout_s` s."""
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
    """Leave the default process group and close its store, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _HOSTED.clear()
