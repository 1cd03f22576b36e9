"""Weights through Ray's object store: rank 0 of the trainer calls every worker of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from unirl.config.errors import StallError
from unirl.distributed.group.failures import Failure
from unirl.distributed.weight_sync.bucket import Bucket
from unirl.distributed.weight_sync.channel import Inlet, Neighbour, Outlet, bucket_of, header_of


@dataclass(frozen=True)
class ObjectStore:
    """A bucket is stored once per node and read by every worker there; it never passes the driver."""

    workers: Sequence[Any]
    """Handles of the engine's actors, in rank order."""
    role: str
    """The engine's name among its siblings."""
    deadline_s: float
    double_buffered: bool = True
    """The next bucket is packed while the last one is under way."""

    every_rank: ClassVar[bool] = False
    listens: ClassVar[bool] = False

    def outlet(self, neighbour: Neighbour | None) -> Outlet:
        return ObjectStoreOutlet(self)

    def inlet(self, rank: int) -> Inlet:
        raise AssertionError("nobody listens on this route")


class ObjectStoreOutlet:
    """At most two buckets are in the store: one that workers read, one being packed."""

    def __init__(self, route: ObjectStore) -> None:
        self.route = route
        self.under_way: list[Any] = []

    def begin(self) -> None:
        self.under_way = []

    def put(self, bucket: Bucket) -> None:
        import ray

        packed = ray.put((header_of(bucket), bucket.data.cpu().numpy()))
        self.finish()
        what = f"{self.route.role}.receive_packed"
        self.under_way = [
            worker.attempt.remote(what, "invoke", self.route.role, "receive_packed", packed)
            for worker in self.route.workers
        ]
        if not self.route.double_buffered:
            self.finish()

    def finish(self) -> None:
        import ray

        try:
            results = ray.get(self.under_way, timeout=self.route.deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            raise StallError(f"an engine took more than {self.route.deadline_s:g} s for a bucket", code=8001) from error
        self.under_way = []
        failures = [result for result in results if isinstance(result, Failure)]
        if failures:
            raise failures[0].exception()

    def abort(self, reason: str) -> None:
        self.under_way = []


def unpacked(packed: tuple[dict[str, Any], np.ndarray[Any, Any]]) -> Bucket:
    """The bucket of what came through the store; its bytes are copied, as the store's own are read-only."""
    header, data = packed
    return bucket_of(header, torch.from_numpy(data.copy()))
