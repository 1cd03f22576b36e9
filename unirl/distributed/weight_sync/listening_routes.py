"""Routes on which the engine listens: a broadcast over a process group, and a shared buffer on one device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from unirl.config.errors import StallError, SyncError
from unirl.distributed.group.rank import current
from unirl.distributed.group.rendezvous import Address, Rendezvous
from unirl.distributed.weight_sync.buckets import Bucket, BucketPlan
from unirl.distributed.weight_sync.routes import (
    ColocatedEngine,
    Header,
    HeaderStore,
    ReceiveBuckets,
    SendBuckets,
    WeightRoute,
)
from unirl.types.device import synchronize


@dataclass(frozen=True)
class BroadcastRoute(WeightRoute):
    """A broadcast over gloo or NCCL: rank 0 is the sender, rank i + 1 is engine rank i. A store carries the headers."""

    address: Address
    plans: Sequence[BucketPlan]
    num_engines: int
    deadline_s: float
    connect_s: float

    every_rank = False
    listens = True

    def open_sender(self, engine_in_process: ColocatedEngine | None) -> SendBuckets:
        """Open the sender's end. Returns when all engines have joined."""
        return BroadcastGroup(self, 0).send

    def open_receiver(self, rank: int) -> ReceiveBuckets:
        """Open an engine's end. Returns when all ends have joined."""
        return BroadcastGroup(self, rank + 1).receive


class BroadcastGroup:
    """One end of the broadcast, in a process group made without the default group and environment variables."""

    def __init__(self, route: BroadcastRoute, rank: int) -> None:
        self.deadline_s = route.deadline_s
        self.device = current().device
        self.headers = HeaderStore(route.address, route.plans, route.deadline_s, route.connect_s)
        members = ("the trainer's rank 0", *(f"engine rank {engine}" for engine in range(route.num_engines)))
        meeting = Rendezvous(route.address, "weight sync", members, route.connect_s, route.deadline_s)
        self.group = meeting.new_group(rank, self.device)

    def send(self, buckets: Iterator[Bucket]) -> None:
        """Send the buckets of one transfer."""
        with self.headers.sending():
            for bucket in buckets:
                self.headers.announce(bucket)
                self._broadcast(bucket.data, bucket.number)

    def receive(self) -> Iterator[Bucket]:
        """The buckets of the next transfer."""
        for header, plan in self.headers.announced():
            data = torch.empty(plan.num_bytes, dtype=torch.uint8, device=self.device)
            self._broadcast(data, header["number"])
            yield Bucket(**header, entries=plan.entries, data=data)

    def _broadcast(self, data: Tensor, number: int) -> None:
        work = self.group.broadcast(data, 0)
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            what = f"the broadcast of bucket {number}"
            if "imed out" in str(error) or "imeout" in str(error):
                raise StallError(f"{what} took more than {self.deadline_s:g} s") from error
            raise SyncError(f"{what} broke off: {error}") from error


SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class SharedBufferRoute(WeightRoute):
    """A buffer that two processes on one device share: rank r of the trainer sends to rank r of the engine.

    The buffer is allocated once and its handle is passed once: CUDA IPC on a GPU, a file in shared memory on a CPU.
    Headers and acknowledgements go through the store. The buffer is reused when its last bucket has been copied.
    """

    address: Address
    plans: Sequence[BucketPlan]
    deadline_s: float
    connect_s: float

    every_rank = True
    listens = True

    def open_sender(self, engine_in_process: ColocatedEngine | None) -> SendBuckets:
        """Open the sender's end. Returns when the engine has opened the buffer."""
        headers, device = self._headers(current().rank), current().device
        buffer, handle = share_buffer(max((plan.num_bytes for plan in self.plans), default=0), device)
        try:
            headers.tell("handle", handle)
            headers.hear("open", "an engine to open the shared buffer")
        finally:
            if "path" in handle:
                os.unlink(handle["path"])  # the memory stays as long as one end maps it
        return SharedBuffer(buffer, headers).send

    def open_receiver(self, rank: int) -> ReceiveBuckets:
        """Open the engine's end. Returns when the buffer is open."""
        headers = self._headers(rank)
        handle = headers.hear("handle", "the handle of the shared buffer")
        buffer = open_buffer(handle, current().device)
        headers.tell("open", {})
        return SharedBuffer(buffer, headers).receive

    def _headers(self, rank: int) -> HeaderStore:
        return HeaderStore(self.address, self.plans, self.deadline_s, self.connect_s, f"weights-{rank}")


@dataclass(frozen=True)
class SharedBuffer:
    """One end of the route. The buffer has one bucket at a time."""

    data: Tensor  # [bytes] uint8
    headers: HeaderStore

    def send(self, buckets: Iterator[Bucket]) -> None:
        """Copy each bucket into the buffer after the engine has copied the last one."""
        with self.headers.sending():
            for bucket in buckets:
                self.data[: bucket.data.numel()].copy_(bucket.data)
                synchronize(self.data.device)
                self.headers.announce(bucket)
                self.headers.hear(self.headers.receipt_key(bucket), f"an engine's receipt of bucket {bucket.number}")

    def receive(self) -> Iterator[Bucket]:
        """The buckets of the next transfer, in the shared buffer."""
        for header, plan in self.headers.announced():
            bucket = Bucket(**header, entries=plan.entries, data=self.data[: plan.num_bytes])
            yield bucket
            synchronize(self.data.device)
            self.headers.tell(self.headers.receipt_key(bucket), {})


def share_buffer(size: int, device: torch.device) -> tuple[Tensor, Header]:
    """A buffer [size] uint8 that another process on this machine can open with the handle, which may be JSON.

    CUDA IPC on a GPU. On a CPU a file in shared memory, whose path is to be removed once the other process has it open.
    """
    return (_share_file if device.type == "cpu" else _share_cuda)(size, device)


def open_buffer(handle: Header, device: torch.device) -> Tensor:
    """The buffer of another process, by its handle. On a GPU it must be the same device."""
    return (_open_file if "path" in handle else _open_cuda)(handle, device)


def _share_file(size: int, device: torch.device) -> tuple[Tensor, Header]:
    file, path = tempfile.mkstemp(prefix="unirl-weights-", dir=SHARED_MEMORY)
    os.ftruncate(file, size)
    os.close(file)
    handle = {"path": path, "size": size}
    return _open_file(handle, device), handle


def _open_file(handle: Header, device: torch.device) -> Tensor:
    return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)


def _share_cuda(size: int, device: torch.device) -> tuple[Tensor, Header]:
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    shared = buffer.untyped_storage()._share_cuda_()
    return buffer, {"parts": [part.hex() if isinstance(part, bytes) else part for part in shared]}


def _open_cuda(handle: Header, device: torch.device) -> Tensor:
    """The sender's memory, with the index that the device has in this process."""
    _, *parts = (bytes.fromhex(part) if isinstance(part, str) else part for part in handle["parts"])
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
