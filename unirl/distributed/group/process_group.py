"""The process group of a role's ranks, joined through a store that rank 0 hosts. No environment variables."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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


def group_beside(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A process group beside the default one, for messages of our own: NCCL between GPUs, else gloo."""
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def join(
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


def leave() -> None:
    """Leave the group and close the store, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _HOSTED.clear()
