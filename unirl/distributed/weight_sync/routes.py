"""Routes carry buckets from the sender to the engines. This file has the contract and the routes that need no listener.

open_sender    at the sender: a function that sends the buckets of one transfer
open_receiver  at an engine, for routes on which it must listen: a function that yields them, in order
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch.distributed import DistNetworkError, DistStoreError

from unirl.config.errors import StallError, SyncError
from unirl.distributed.group.failures import WorkerFailure
from unirl.distributed.group.rendezvous import Address, join_store
from unirl.distributed.weight_sync.buckets import Bucket, BucketPlan

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class ColocatedEngine(Protocol):
    """An engine that lives in the sender's own process."""

    def receive(self, bucket: Bucket) -> None: ...


SendBuckets = Callable[[Iterator[Bucket]], None]
"""Sends the buckets of one transfer, one at a time, and returns when all have arrived at the other ends.

An exception raised by the iterator ends the transfer early. Engines that listen are told the reason.
"""
ReceiveBuckets = Callable[[], Iterator[Bucket]]
"""The buckets of the next transfer. The memory of a bucket may be reused when the next one is taken."""


class WeightRoute(ABC):
    """A route for buckets. The driver sends it to both sides, and each side opens its end."""

    every_rank: ClassVar[bool]
    """True: trainer rank r sends to engine rank r. False: trainer rank 0 sends to all engine ranks."""
    listens: ClassVar[bool]
    """True when the engine must listen while the sender sends."""

    @abstractmethod
    def open_sender(self, engine_in_process: ColocatedEngine | None) -> SendBuckets:
        """Open the end of the calling trainer rank."""

    def open_receiver(self, rank: int) -> ReceiveBuckets:
        """Open the end of engine rank `rank`."""
        raise AssertionError("engines do not listen on this route")


class InProcessRoute(WeightRoute):
    """A route to the engine in the sender's own process."""

    every_rank = True
    listens = False

    def open_sender(self, engine_in_process: ColocatedEngine | None) -> SendBuckets:
        assert engine_in_process is not None, "the route is chosen where the engine is colocated"
        engine = engine_in_process

        def send(buckets: Iterator[Bucket]) -> None:
            for bucket in buckets:
                engine.receive(bucket)

        return send


@dataclass(frozen=True)
class ObjectStoreRoute(WeightRoute):
    """A route through Ray's object store. A bucket is stored once per node and read by the workers there."""

    workers: Sequence[ActorHandle]
    """The engine's actors, in rank order."""
    role: str
    """The engine's name among its siblings."""
    deadline_s: float

    every_rank = False
    listens = False

    def open_sender(self, engine_in_process: ColocatedEngine | None) -> SendBuckets:
        return self._send

    def _send(self, buckets: Iterator[Bucket]) -> None:
        import ray

        call = (f"{self.role}.receive", "invoke", self.role, "receive")
        for bucket in buckets:
            stored = ray.put(bucket)
            try:
                results = ray.get([w.attempt.remote(*call, stored) for w in self.workers], timeout=self.deadline_s)
            except ray.exceptions.GetTimeoutError as error:
                raise StallError(f"an engine took more than {self.deadline_s:g} s for a bucket") from error
            for result in results:
                if isinstance(result, WorkerFailure):
                    raise result.exception()


Header = dict[str, Any]
"""A message through the store, as JSON."""


class HeaderStore:
    """A key-value store through which the ends of a route exchange the headers of buckets and acknowledge buckets.

    Keys are `{transfer}/{bucket}`. The keys of a transfer are deleted at the beginning of the next one.
    """

    def __init__(
        self,
        address: Address,
        plans: Sequence[BucketPlan],
        deadline_s: float,
        connect_s: float,
        name: str = "weights",
    ) -> None:
        self.plans = plans
        self.deadline_s = deadline_s
        self.store = join_store(address, name, deadline_s, connect_s)
        self.transfer = -1
        self.number = 0
        self.used: list[str] = []

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Begin the next transfer, and end it after the block, or early when the block raises."""
        self._begin()
        try:
            yield
        except BaseException as error:
            self._write({"error": f"{type(error).__name__}: {error}"})
            raise
        self._write(END)

    def announce(self, bucket: Bucket) -> None:
        """Publish the header of a bucket: all but its bytes and its plan, which both ends have."""
        self._write({"version": bucket.version, "weights": bucket.weights, "number": bucket.number})

    def _write(self, header: Header) -> None:
        self.tell(f"{self.transfer}/{self.number}", header)
        self.number += 1

    def announced(self) -> Iterator[tuple[Header, BucketPlan]]:
        """Headers and plans of the next transfer. Raises SyncError when the sender ended it early."""
        self._begin()
        while (header := self.hear(f"{self.transfer}/{self.number}", f"the header of bucket {self.number}")) != END:
            if "error" in header:
                raise SyncError(f"the trainer ended the transfer early: {header['error']}")
            yield header, self.plans[self.number]
            self.number += 1

    def _begin(self) -> None:
        for key in self.used:
            self.store.delete_key(key)
        self.used.clear()
        self.transfer += 1
        self.number = 0

    def receipt_key(self, bucket: Bucket) -> str:
        """The key under which an engine reports that it has copied a bucket."""
        return f"{self.transfer}/{bucket.number}/taken"

    def tell(self, key: str, value: Header) -> None:
        """Publish a value until the next transfer."""
        self.store.set(key, json.dumps(value))
        self.used.append(key)

    def hear(self, key: str, what: str) -> Header:
        """Wait for the value of a key."""
        try:
            value: Header = json.loads(bytes(self.store.get(key)))
        except DistNetworkError as error:
            raise SyncError(f"weight sync lost its connection while it waited for {what}: {error}") from error
        except DistStoreError as error:
            raise StallError(f"weight sync waited {self.deadline_s:g} s for {what}, which did not come") from error
        return value


END: Header = {"end": True}
"""The header after the last bucket."""
