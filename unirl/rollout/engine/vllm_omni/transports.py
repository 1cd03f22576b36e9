"""The ways of weights from the engine to its server: in the body of a request, or through a buffer that both share.

The header of a bucket always travels in a request, whose answer says that the server has taken the tensors over. There
is no broadcast: the engine and its server are on one device, and NCCL refuses two processes on one GPU. NCCL brings the
weights from the trainer to the engine (`sync.transport`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.distributed.weight_sync.buckets import ALIGNMENT
from unirl.distributed.weight_sync.listening_routes import share_buffer
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.rollout.engine.serving.payloads import bytes_of
from unirl.rollout.engine.serving.settings import ServerTransport
from unirl.rollout.engine.vllm_omni import messages
from unirl.rollout.engine.vllm_omni.program.wire import BINARY, bucket_head
from unirl.types.device import synchronize


class WeightTransport(ABC):
    """Sends the tensors of buckets to a server."""

    def __init__(self, server: HttpServer, device: torch.device) -> None:
        self.server = server
        self.device = device

    @abstractmethod
    def reset(self) -> None:
        """Forget the server: another one has been started in its place."""

    @abstractmethod
    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors by their names in requests. Returns when the server has them; their memory is then free."""

    def _announce(self, header: Mapping[str, object], data: Sequence[bytes | memoryview] = ()) -> None:
        body = [bucket_head(header), *data]
        self.server.insist("to /weights/bucket", lambda: self.server.post_bytes("/weights/bucket", body, BINARY))


class HttpTransport(WeightTransport):
    """Tensors in the bodies of requests, through main memory."""

    def reset(self) -> None:
        """It keeps nothing about the server."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        entries, size = messages.entries(tensors, ALIGNMENT)
        self._announce({"by": "body", "entries": entries, "num_bytes": size}, parts(tensors))


class SharedBufferTransport(WeightTransport):
    """A buffer that the server has opened: CUDA IPC on a GPU, which both must share, or shared memory on a CPU."""

    def __init__(self, server: HttpServer, device: torch.device) -> None:
        super().__init__(server, device)
        self.buffer: Tensor | None = None

    def reset(self) -> None:
        self.buffer = None

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        entries, size = messages.entries(tensors, ALIGNMENT)
        buffer = self._buffer(size)
        pack(tensors, entries, buffer)
        synchronize(self.device)
        self._announce({"by": "buffer", "entries": entries, "num_bytes": size})

    def _buffer(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes that the server has open."""
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer, handle = share_buffer(size, self.device)
            try:
                self.server.insist_on("/weights/open", handle)
            finally:
                if "path" in handle:
                    os.unlink(handle["path"])
        return self.buffer


def parts(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The bytes of the tensors, each where `messages.entries` places it. Those in main memory are not copied."""
    padded = ((bytes_of(tensor), bytes(-tensor.nbytes % ALIGNMENT)) for tensor in tensors.values())
    return [part for pair in padded for part in pair]


def pack(tensors: Mapping[str, Tensor], entries: list[tuple[str, str, list[int], int]], buffer: Tensor) -> None:
    """Copy the tensors into the buffer [bytes] uint8, at their offsets."""
    for name, _, shape, offset in entries:
        tensor = tensors[name]
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(shape).copy_(tensor.detach())


TRANSPORTS: Mapping[ServerTransport, type[WeightTransport]] = {"http": HttpTransport, "ipc": SharedBufferTransport}
