"""Routes on which the engine listens: a broadcast over a process group, and a shared buffer on one device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from unirl.config.errors import StallError, SyncError
from unirl.distributed.group.rank import current, new_process_group
from unirl.distributed.weight_sync.buckets import Bucket, bucket_of, header_of
from unirl.distributed.weight_sync.routes import END, BucketReceiver, BucketSender, ColocatedEngine, HeaderStore


@dataclass(frozen=True)
class BroadcastRoute:
    """A broadcast over gloo or NCCL: rank 0 is the sender, rank i + 1 is engine rank i. A store carries the headers."""

    host: str
    port: int
    num_engines: int
    deadline_s: float

    every_rank: ClassVar[bool] = False
    listens: ClassVar[bool] = True

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """Open the sender's end. Returns when all engines have joined."""
        headers = HeaderStore(self.host, self.port, self.deadline_s)
        return BroadcastSender(headers, BroadcastGroup(self, headers, 0))

    def open_receiver(self, rank: int) -> BucketReceiver:
        """Open an engine's end. Returns when all ends have joined."""
        headers = HeaderStore(self.host, self.port, self.deadline_s)
        return BroadcastReceiver(headers, BroadcastGroup(self, headers, rank + 1))


class BroadcastGroup:
    """The process group of the broadcast, made without the default group and environment variables."""

    def __init__(self, route: BroadcastRoute, headers: HeaderStore, rank: int) -> None:
        self.deadline_s = route.deadline_s
        self.device = current().device
        store = PrefixStore("group", headers.store)  # its keys must not collide with the header store's
        self.group = new_process_group(store, rank, route.num_engines + 1, self.device, route.deadline_s)

    def start(self, data: Tensor) -> Any:
        """Start to broadcast `data` from rank 0."""
        return self.group.broadcast(data, 0)

    def wait(self, work: Any, what: str) -> None:
        """Wait until `work` is done."""
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            if "imed out" in str(error) or "imeout" in str(error):
                raise StallError(f"the broadcast of {what} took more than {self.deadline_s:g} s") from error
            raise SyncError(f"the broadcast of {what} broke off: {error}") from error


class BroadcastSender:
    """Sends one bucket at a time."""

    def __init__(self, headers: HeaderStore, group: BroadcastGroup) -> None:
        self.headers = headers
        self.group = group
        self.number = 0

    def begin(self) -> None:
        self.headers.begin()
        self.number = 0

    def put(self, bucket: Bucket) -> None:
        self.headers.write(self.number, header_of(bucket))
        self.number += 1
        self.group.wait(self.group.start(bucket.data), f"bucket {bucket.number}")

    def finish(self) -> None:
        self.headers.write(self.number, END)

    def abort(self, reason: str) -> None:
        self.headers.write(self.number, {"error": reason})


class BroadcastReceiver:
    """Receives one bucket at a time."""

    def __init__(self, headers: HeaderStore, group: BroadcastGroup) -> None:
        self.headers = headers
        self.group = group

    def buckets(self) -> Iterator[Bucket]:
        self.headers.begin()
        number = 0
        while (header := self.headers.read(number)) != END:
            data = torch.empty(header["num_bytes"], dtype=torch.uint8, device=self.group.device)
            self.group.wait(self.group.start(data), f"bucket {number}")
            yield bucket_of(header, data)
            number += 1


# A shared buffer


SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class SharedBufferRoute:
    """A buffer that two processes on one device share: rank r of the trainer sends to rank r of the engine.

    The buffer is allocated once and its handle is passed once: CUDA IPC on a GPU, a file in shared memory on a CPU.
    Headers and acknowledgements go through the store. The buffer is reused when its last bucket has been copied.
    """

    host: str
    port: int
    num_bytes: int
    """The size of the buffer: at least that of the largest bucket."""
    deadline_s: float

    every_rank: ClassVar[bool] = True
    listens: ClassVar[bool] = True

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """Open the sender's end. Returns when the engine has opened the buffer."""
        return SharedBufferSender(self.num_bytes, self._headers(current().rank))

    def open_receiver(self, rank: int) -> BucketReceiver:
        """Open the engine's end. Returns when the buffer is open."""
        return SharedBufferReceiver(self._headers(rank))

    def _headers(self, rank: int) -> HeaderStore:
        return HeaderStore(self.host, self.port, self.deadline_s, f"weights-{rank}")


class SharedBufferSender:
    """Copies each bucket into the buffer after the engine has copied the last one."""

    def __init__(self, num_bytes: int, headers: HeaderStore) -> None:
        self.headers = headers
        self.number = 0
        share = _share_cuda if current().device.type == "cuda" else _share_file
        self.buffer, handle = share(num_bytes, current().device)
        try:
            headers.tell("handle", handle)
            headers.hear("open", "an engine to open the shared buffer")
        finally:
            if "path" in handle:
                os.unlink(handle["path"])  # the memory stays as long as one end maps it

    def begin(self) -> None:
        self.headers.begin()
        self.number = 0

    def put(self, bucket: Bucket) -> None:
        self.buffer[: bucket.data.numel()].copy_(bucket.data)
        _synchronise(self.buffer)
        self.headers.write(self.number, header_of(bucket))
        self.headers.await_receipt(self.number)
        self.number += 1

    def finish(self) -> None:
        self.headers.write(self.number, END)

    def abort(self, reason: str) -> None:
        self.headers.write(self.number, {"error": reason})


class SharedBufferReceiver:
    """Reads each bucket in the shared buffer."""

    def __init__(self, headers: HeaderStore) -> None:
        self.headers = headers
        handle = headers.hear("handle", "the handle of the shared buffer")
        open_buffer = _open_file if "path" in handle else _open_cuda
        self.buffer = open_buffer(handle, current().device)
        headers.tell("open", {})

    def buckets(self) -> Iterator[Bucket]:
        self.headers.begin()
        number = 0
        while (header := self.headers.read(number)) != END:
            yield bucket_of(header, self.buffer[: header["num_bytes"]])
            _synchronise(self.buffer)
            self.headers.acknowledge(number)
            number += 1


def _synchronise(buffer: Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def _share_file(size: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    file, path = tempfile.mkstemp(prefix="unirl-weights-", dir=SHARED_MEMORY)
    os.ftruncate(file, size)
    os.close(file)
    handle = {"path": path, "size": size}
    return _open_file(handle, device), handle


def _open_file(handle: dict[str, Any], device: torch.device) -> Tensor:
    return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)


def _share_cuda(size: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    shared = buffer.untyped_storage()._share_cuda_()
    return buffer, {"parts": [part.hex() if isinstance(part, bytes) else part for part in shared]}


def _open_cuda(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The sender's memory, with the index that the device has in this process."""
    _, *parts = (bytes.fromhex(part) if isinstance(part, str) else part for part in handle["parts"])
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
