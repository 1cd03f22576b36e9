"""How buckets get from a sender to engines: a route, and its two ends.

WeightRoute.open_sender    at the sender: put(bucket), put(bucket), ..., finish()
WeightRoute.open_receiver   at an engine, for routes on which it must listen: the buckets, in order
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
    """An engine in the sender's own process."""

    def receive(self, bucket: Bucket) -> None: ...


class BucketSender(Protocol):
    """The sender's end."""

    def begin(self) -> None:
        """Before the first bucket of a transfer."""
        ...

    def put(self, bucket: Bucket) -> None:
        """Send a bucket; its memory may be filled again when this returns."""
        ...

    def finish(self) -> None:
        """Return when all buckets are in."""
        ...

    def abort(self, reason: str) -> None:
        """Give the transfer up and tell the other ends."""
        ...


class BucketReceiver(Protocol):
    """An engine's end, where it listens."""

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of the next transfer."""
        ...


class WeightRoute(Protocol):
    """A way for buckets; it travels to both ends, and each opens its own."""

    every_rank: ClassVar[bool]
    """Each rank of the trainer sends to the engine in its own process; else rank 0 sends to all."""
    listens: ClassVar[bool]
    """The engine must be listening while the sender sends."""

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """The end of the trainer's rank that calls."""
        ...

    def open_receiver(self, rank: int) -> BucketReceiver:
        """The end of engine rank `rank`."""
        ...


class InProcessRoute:
    """To the engine in the sender's own process."""

    every_rank: ClassVar[bool] = True
    listens: ClassVar[bool] = False

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """The colocated engine itself."""
        assert colocated_engine is not None, "the route is chosen where the engine is colocated"
        return InProcessSender(colocated_engine)

    def open_receiver(self, rank: int) -> BucketReceiver:
        raise AssertionError("nobody listens on this route")


class InProcessSender:
    """Hands buckets over."""

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
    """What the ends of a listening route tell each other: headers of buckets, and receipts for them.

    Keys are `{transfer}/{bucket}`; those of a transfer are deleted at the beginning of the next.
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
        """The next transfer."""
        for key in self.used:
            self.store.delete_key(key)
        self.used.clear()
        self.transfer += 1

    def write(self, number: int, header: dict[str, Any]) -> None:
        """Publish the header of bucket `number`."""
        self.tell(f"{self.transfer}/{number}", header)

    def read(self, number: int) -> dict[str, Any]:
        """The header of bucket `number`, once it is there. Raises SyncError when the sender gave up."""
        header = self.hear(f"{self.transfer}/{number}", f"the header of bucket {number}")
        if "error" in header:
            raise SyncError(f"the trainer gave the transfer up: {header['error']}")
        return header

    def acknowledge(self, number: int) -> None:
        """Bucket `number` is taken over."""
        self.tell(f"{self.transfer}/{number}/taken", {})

    def await_receipt(self, number: int) -> None:
        """Return when bucket `number` is taken over."""
        self.hear(f"{self.transfer}/{number}/taken", f"an engine's receipt of bucket {number}")

    def tell(self, key: str, value: dict[str, Any]) -> None:
        """Publish a value until the next transfer."""
        self.store.set(key, json.dumps(value))
        self.used.append(key)

    def hear(self, key: str, what: str) -> dict[str, Any]:
        """The value of a key, once it is there."""
        from torch.distributed import DistNetworkError, DistStoreError

        try:
            value: dict[str, Any] = json.loads(bytes(self.store.get(key)))
        except DistNetworkError as error:
            raise SyncError(f"weight sync lost its other end while it waited for {what}: {error}") from error
        except DistStoreError as error:
            raise StallError(f"weight sync waited {self.deadline_s:g} s for {what} in vain") from error
        return value


END = {"end": True}
"""The header after the last bucket."""


@dataclass(frozen=True)
class ObjectStoreRoute:
    """A bucket is stored once per node and read by every worker there; it never passes the driver."""

    workers: Sequence[Any]
    """Handles of the engine's actors, in rank order."""
    role: str
    """The engine's name among its siblings."""
    deadline_s: float

    every_rank: ClassVar[bool] = False
    listens: ClassVar[bool] = False

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        return ObjectStoreSender(self)

    def open_receiver(self, rank: int) -> BucketReceiver:
        raise AssertionError("nobody listens on this route")


class ObjectStoreSender:
    """One bucket at a time."""

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
    """The bucket of what came through the store; its bytes are copied, as the store's own are read-only."""
    header, data = packed
    return bucket_of(header, torch.from_numpy(data.copy()))
