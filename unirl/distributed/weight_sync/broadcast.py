"""Weights by collective broadcast: rank 0 of the trainer to all ranks of the engine, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from unirl.config.errors import StallError, SyncError
from unirl.distributed.group.process_group import group_beside
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


@dataclass(frozen=True)
class BroadcastRoute:
    """A process group of its own: rank 0 is the sender, rank i + 1 is engine rank i. Headers go through the store."""

    host: str
    port: int
    num_engines: int
    deadline_s: float

    every_rank: ClassVar[bool] = False
    listens: ClassVar[bool] = True

    def open_sender(self, colocated_engine: ColocatedEngine | None) -> BucketSender:
        """Returns when all engines have joined."""
        headers = HeaderStore(self.host, self.port, self.deadline_s)
        return BroadcastSender(headers, BroadcastGroup(self, headers, 0))

    def open_receiver(self, rank: int) -> BucketReceiver:
        """Returns when all ends have joined."""
        headers = HeaderStore(self.host, self.port, self.deadline_s)
        return BroadcastReceiver(headers, BroadcastGroup(self, headers, rank + 1))


class BroadcastGroup:
    """The process group, made explicitly: no default group, no environment."""

    def __init__(self, route: BroadcastRoute, headers: HeaderStore, rank: int) -> None:
        self.deadline_s = route.deadline_s
        self.device = current().device
        store = PrefixStore("group", headers.store)  # its keys must not collide with the header store's
        self.group = group_beside(store, rank, route.num_engines + 1, self.device, route.deadline_s)

    def start(self, data: Tensor) -> Any:
        """Begin to broadcast from rank 0 into `data`."""
        return self.group.broadcast(data, 0)

    def wait(self, work: Any, what: str) -> None:
        """Return when `work` is done."""
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            if "imed out" in str(error) or "imeout" in str(error):
                raise StallError(f"the broadcast of {what} took more than {self.deadline_s:g} s") from error
            raise SyncError(f"the broadcast of {what} broke off: {error}") from error


class BroadcastSender:
    """One bucket at a time."""

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
    """Takes one bucket after the other off the wire."""

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
