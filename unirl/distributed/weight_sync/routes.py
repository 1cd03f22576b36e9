"""Routes carry buckets from the sender to the engines. This file has the contract and the routes that need no listener.

open_sender    at the sender: begin(), put(bucket), put(bucket), ..., finish()
open_receiver  at an engine, for routes on which it must listen: yields the buckets, in order
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from unirl.config.errors import StallError, SyncError
from unirl.distributed.group.failures import WorkerFailure
from unirl.distributed.weight_sync.buckets import Bucket, bucket_of, header_of


class ColocatedEngine(Protocol):
    """An engine that lives in the sender's own process."""

    def receive(self, bucket: Bucket) -> None: ...


class BucketSender(Protocol):
    """The sender's end of a route."""

    def begin(self) -> None:
        """Called before the first bucket of a transfer."""
        ...

    def put(self, bucket: Bucket) -> None:
        """Send a bucket. Its memory may be reused when this returns."""
        ...

    def finish(self) -> None:
        """Returns when all buckets have arrived."""
        ...

    def abort(self, reason: str) -> None:
        """End the transfer early and tell the other ends why."""
        ...


class BucketReceiver(Protocol):
    """An engine's end of a route on which it listens."""

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of the next transfer."""
        ...


class WeightRoute(Protocol):
    """A route for buckets. The driver sends it to both sides, and each side opens its end."""

    every_rank: ClassVar[bool]
    """True: trainer rank r sends to engine rank r. False: trainer rank 0 sends to all engine ranks."""
    listens: ClassVar[bool]
    """True when the engine must listen while the sender sends."""

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """Open the end of the calling trainer rank."""
        ...

    def open_receiver(self, rank: int) -> BucketReceiver:
        """Open the end of engine rank `rank`."""
        ...


class InProcessRoute:
    """A route to the engine in the sender's own process."""

    every_rank: ClassVar[bool] = True
    listens: ClassVar[bool] = False

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """The end that calls the engine directly."""
        assert colocated_engine is not None, "the route is chosen where the engine is colocated"
        return InProcessSender(colocated_engine)

    def open_receiver(self, rank: int) -> BucketReceiver:
        raise AssertionError("engines do not listen on this route")


class InProcessSender:
    """Passes buckets to the engine's `receive`."""

    def __init__(self, colocated_engine: ColocatedEngine) -> None:
        self.colocated_engine = colocated_engine

    def begin(self) -> None:
        pass

    def put(self, bucket: Bucket) -> None:
        self.colocated_engine.receive(bucket)

    def finish(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass


class HeaderStore:
    """A key-value store through which the ends of a route exchange the headers of buckets and acknowledge buckets.

    Keys are `{transfer}/{bucket}`. The keys of a transfer are deleted at the beginning of the next one.
    """

    def __init__(self, host: str, port: int, deadline_s: float, name: str = "weights") -> None:
        from torch.distributed import PrefixStore, TCPStore

        self.deadline_s = deadline_s
        timeout = timedelta(seconds=deadline_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.store = PrefixStore(name, store)
        self.transfer = -1
        self.used: list[str] = []

    def begin(self) -> None:
        """Begin the next transfer."""
        for key in self.used:
            self.store.delete_key(key)
        self.used.clear()
        self.transfer += 1

    def write(self, number: int, header: dict[str, Any]) -> None:
        """Publish the header of bucket `number`."""
        self.tell(f"{self.transfer}/{number}", header)

    def read(self, number: int) -> dict[str, Any]:
        """Wait for the header of bucket `number`. Raises SyncError when the sender ended the transfer early."""
        header = self.hear(f"{self.transfer}/{number}", f"the header of bucket {number}")
        if "error" in header:
            raise SyncError(f"the trainer ended the transfer early: {header['error']}")
        return header

    def acknowledge(self, number: int) -> None:
        """Report that bucket `number` has been copied."""
        self.tell(f"{self.transfer}/{number}/taken", {})

    def await_receipt(self, number: int) -> None:
        """Wait until bucket `number` has been copied."""
        self.hear(f"{self.transfer}/{number}/taken", f"an engine's receipt of bucket {number}")

    def tell(self, key: str, value: dict[str, Any]) -> None:
        """Publish a value until the next transfer."""
        self.store.set(key, json.dumps(value))
        self.used.append(key)

    def hear(self, key: str, what: str) -> dict[str, Any]:
        """Wait for the value of a key."""
        from torch.distributed import DistNetworkError, DistStoreError

        try:
            value: dict[str, Any] = json.loads(bytes(self.store.get(key)))
        except DistNetworkError as error:
            raise SyncError(f"weight sync lost its connection while it waited for {what}: {error}") from error
        except DistStoreError as error:
            raise StallError(f"weight sync waited {self.deadline_s:g} s for {what}, which did not come") from error
        return value


END = {"end": True}
"""The header after the last bucket."""


@dataclass(frozen=True)
class ObjectStoreRoute:
    """A route through Ray's object store. A bucket is stored once per node and read by the workers there."""

    workers: Sequence[Any]
    """The engine's actors, in rank order."""
    role: str
    """The engine's name among its siblings."""
    deadline_s: float

    every_rank: ClassVar[bool] = False
    listens: ClassVar[bool] = False

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        return ObjectStoreSender(self)

    def open_receiver(self, rank: int) -> BucketReceiver:
        raise AssertionError("engines do not listen on this route")


class ObjectStoreSender:
    """Sends one bucket at a time."""

    def __init__(self, route: ObjectStoreRoute) -> None:
        self.route = route

    def begin(self) -> None:
        pass

    def put(self, bucket: Bucket) -> None:
        import ray

        packed = ray.put((header_of(bucket), bucket.data.cpu().numpy()))
        what = f"{self.route.role}.receive_packed"
        calls = [
            worker.attempt.remote(what, "invoke", self.route.role, "receive_packed", packed)
            for worker in self.route.workers
        ]
        try:
            results = ray.get(calls, timeout=self.route.deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            raise StallError(f"an engine took more than {self.route.deadline_s:g} s for a bucket") from error
        failures = [result for result in results if isinstance(result, WorkerFailure)]
        if failures:
            raise failures[0].exception()

    def finish(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass


def unpacked(packed: tuple[dict[str, Any], np.ndarray[Any, Any]]) -> Bucket:
    """The bucket that came through the object store. Its bytes are copied, because the store's are read-only."""
    header, data = packed
    return bucket_of(header, torch.from_numpy(data.copy()))
