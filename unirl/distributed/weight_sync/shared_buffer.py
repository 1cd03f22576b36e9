"""Weights through memory that two processes of one device share: rank r of the trainer to rank r of the engine.

One buffer is allocated once, and its handle is passed once: CUDA IPC on a GPU, a file in shared memory on a CPU.
Headers and receipts go through the store; the buffer is filled again when its last bucket is taken over.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.distributed.group.rank import current
from unirl.distributed.weight_sync.bucket import Bucket
from unirl.distributed.weight_sync.channel import (
    END,
    BucketReceiver,
    BucketSender,
    ColocatedEngine,
    HeaderStore,
    bucket_of,
    header_of,
)

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class SharedBufferRoute:
    """Two processes on one device."""

    host: str
    port: int
    num_bytes: int
    """At least the largest bucket."""
    deadline_s: float

    every_rank: ClassVar[bool] = True
    listens: ClassVar[bool] = True

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """Returns when the engine has opened the buffer."""
        return SharedBufferSender(self.num_bytes, self._headers(current().rank))

    def open_receiver(self, rank: int) -> BucketReceiver:
        """Returns when the buffer is open."""
        return SharedBufferReceiver(self._headers(rank))

    def _headers(self, rank: int) -> HeaderStore:
        return HeaderStore(self.host, self.port, self.deadline_s, f"weights-{rank}")


class SharedBufferSender:
    """Copies each bucket into the buffer once the last one was read."""

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
                os.unlink(handle["path"])  # the memory stays as long as an end has it mapped

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
    """Reads each bucket where it lies."""

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
    """The sender's memory under this process's own number of the device."""
    _, *parts = (bytes.fromhex(part) if isinstance(part, str) else part for part in handle["parts"])
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
