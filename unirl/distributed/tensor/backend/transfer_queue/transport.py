"""Rows as one block of bytes, which the owner puts into a service and the reader takes out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from unirl.distributed.tensor.backend.transfer_queue.runtime import ServiceProcess, guarded
from unirl.distributed.tensor.row_store import RowPayload, as_bytes
from unirl.types.batch import map_value

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes. Every tensor of a block begins at a multiple, so that it can be read as a tensor of its dtype."""


class BlockService(Protocol):
    """A client of the service in one worker. Methods may be called by several threads."""

    @property
    def processes(self) -> Sequence[ServiceProcess]:
        """The processes without which it does not work."""

    def put(self, key: str, block: Tensor) -> None:
        """Keep the bytes of `block`, of type uint8 on the CPU, until they are taken."""

    def take(self, key: str, size: int) -> Tensor:
        """The `size` bytes under a key, on the CPU, which the service then frees."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a block."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self, block: Tensor) -> Tensor:
        """The tensor, as a view of the block."""
        return block[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowMessage:
    """The answer of the owner: the key of the block, and values with a TensorPlace for each tensor."""

    key: str
    size: int
    payloads: list[RowPayload]


class BlockCarrier:
    """Carries the tensors of rows through a service. Values without tensors travel with the owner's answer."""

    def __init__(self, worker: str, connect: Callable[[], BlockService], deadline_s: float) -> None:
        """
        Args:
            worker: the worker's name, which is unique among the runs that share the service.
            connect: makes the worker's client. Called when rows first leave or reach the worker.
            deadline_s: seconds that a call of the service may take.
        """
        self.worker = worker
        self.connect = connect
        self.deadline_s = deadline_s
        self.connecting = threading.Lock()
        self.client: BlockService | None = None
        self.numbers = count()

    @property
    def service(self) -> BlockService:
        """The worker's client, connected."""
        with self.connecting:
            if self.client is None:
                self.client = self.connect()
            return self.client

    def send(self, payloads: Sequence[RowPayload]) -> RowMessage:
        """Put the rows into the service. Returns what a reader needs to take them."""
        tensors: list[tuple[Tensor, TensorPlace]] = []
        end = 0

        def placed(part: object) -> object:
            nonlocal end
            if not isinstance(part, Tensor):
                return map_value(part, Tensor.cpu)
            place = TensorPlace(-(-end // ALIGNMENT) * ALIGNMENT, part.dtype, tuple(part.shape))
            tensors.append((part, place))
            end = place.start + place.num_bytes
            return place

        values = [RowPayload(tree_map(placed, payload.value), payload.on_accelerator) for payload in payloads]
        message = RowMessage(f"{self.worker}/{next(self.numbers)}", end, values)
        if end:
            block = torch.empty(end, dtype=torch.uint8)
            for tensor, place in tensors:
                block[place.start : place.start + place.num_bytes].copy_(as_bytes(tensor.detach()))
            service = self.service
            self._guarded(service, f"{self.worker} sent rows", lambda: service.put(message.key, block))
        return message

    def receive(self, message: RowMessage) -> list[RowPayload]:
        """The rows of a message, which can be taken once. Tensors are on the CPU."""
        block = torch.empty(0, dtype=torch.uint8)
        if message.size:
            service = self.service
            what = f"{self.worker} fetched rows"
            block = self._guarded(service, what, lambda: service.take(message.key, message.size))

        def read(place: TensorPlace) -> Tensor:
            return place.tensor(block)

        return [
            RowPayload(tree_map_only(TensorPlace, read, payload.value), payload.on_accelerator)
            for payload in message.payloads
        ]

    def _guarded(self, service: BlockService, what: str, work: Callable[[], T]) -> T:
        return guarded(what, work, service.processes, self.deadline_s)
