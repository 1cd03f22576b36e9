"""The ways of weights from the engine to its server: in the body of a request, through a shared buffer, by broadcast.

The header of a bucket always travels in a request, whose answer says that the server has taken the tensors over.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from unirl.distributed.group.rendezvous import Rendezvous, host_store
from unirl.distributed.weight_sync.buckets import ALIGNMENT
from unirl.distributed.weight_sync.listening_routes import share_buffer
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.rollout.engine.serving.process import LOOPBACK
from unirl.rollout.engine.vllm_omni import messages
from unirl.rollout.engine.vllm_omni.program.wire import BINARY, bucket_body
from unirl.types.device import synchronize

ServerTransport = Literal["http", "ipc", "nccl"]


class WeightTransport(ABC):
    """Sends the tensors of buckets to a server."""

    def __init__(self, server: HttpServer, device: torch.device) -> None:
        self.server = server
        self.device = device

    def reset(self) -> None:
        """Forget the server: another one has been started in its place."""

    @abstractmethod
    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors by their names in requests. Returns when the server has them; their memory is then free."""

    def _announce(self, header: Mapping[str, object], data: bytes = b"") -> None:
        body = bucket_body(header, data)
        self.server.insist("to /weights/bucket", lambda: self.server.post_bytes("/weights/bucket", body, BINARY))


class HttpTransport(WeightTransport):
    """Tensors in the bodies of requests, through main memory."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        entries, size = messages.entries(tensors, ALIGNMENT)
        data = packed(tensors, entries, torch.empty(size, dtype=torch.uint8))
        self._announce({"by": "body", "entries": entries, "num_bytes": size}, data.numpy().tobytes())


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
        packed(tensors, entries, buffer)
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


class BroadcastTransport(WeightTransport):
    """A process group of the engine and its server: NCCL between GPUs, which need not be the same one, else gloo."""

    def __init__(self, server: HttpServer, device: torch.device, connect_s: float, timeout_s: float) -> None:
        super().__init__(server, device)
        self.connect_s = connect_s
        self.timeout_s = timeout_s
        self.group: Any = None

    def reset(self) -> None:
        self.group = None

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        entries, size = messages.entries(tensors, ALIGNMENT)
        data = packed(tensors, entries, torch.empty(size, dtype=torch.uint8, device=self.device))
        if self.group is None:
            self.group = self._joined()
        header = bucket_body({"by": "group", "entries": entries, "num_bytes": size})
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self.server.post_bytes, "/weights/bucket", header, BINARY)
            self.group.broadcast(data, 0).wait()
            answer.result()

    def _joined(self) -> Any:
        """The process group, when the server has joined it."""
        host, port = host_store(LOOPBACK)
        members = ("the engine of UniRL", "the server")
        meeting = Rendezvous((host, port), "vLLM-Omni weights", members, self.connect_s, self.timeout_s)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self.server.post, "/weights/join", {"host": host, "port": port})
            group = meeting.new_group(0, self.device)
            answer.result()
        return group


def packed(tensors: Mapping[str, Tensor], entries: list[tuple[str, str, list[int], int]], buffer: Tensor) -> Tensor:
    """The buffer [bytes] uint8, filled with the tensors at their offsets."""
    for name, _, shape, offset in entries:
        tensor = tensors[name]
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(shape).copy_(tensor.detach())
    return buffer


def transport_of(
    name: ServerTransport, server: HttpServer, device: torch.device, connect_s: float, timeout_s: float
) -> WeightTransport:
    """The transport of that name."""
    if name == "http":
        return HttpTransport(server, device)
    if name == "ipc":
        return SharedBufferTransport(server, device)
    return BroadcastTransport(server, device, connect_s, timeout_s)
