"""Weights through Ray's object store: rank 0 of the trainer calls every worker of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from unirl.config.errors import StallError
from unirl.distributed.group.failures import WorkerFailure
from unirl.distributed.weight_sync.bucket import Bucket
from unirl.distributed.weight_sync.channel import BucketReceiver, BucketSender, ColocatedEngine, bucket_of, header_of


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
