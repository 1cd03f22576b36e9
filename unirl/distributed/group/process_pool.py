"""Pools whose workers are processes, one per device: what Ray and torchrun have in common."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError
from unirl.distributed.group.base import Pool, num_bytes
from unirl.distributed.group.dispatch import Call, SplitCall, split_call
from unirl.distributed.group.handle import Group, PendingCall, Remote
from unirl.distributed.group.lockstep import check_same_kind
from unirl.distributed.group.rendezvous import MARGIN_S, Rendezvous, named_rendezvous
from unirl.distributed.group.worker import ProcessInfo
from unirl.distributed.tensor.row_store import RowTransportName
from unirl.distributed.tensor.transports import plan_moves, workers_of
from unirl.types.device import DeviceKind

NUMBERS = count()
JOIN_MARGIN_S = 60.0
"""Collectives time out this much later than the driver, whose error says more about the cause."""


@dataclass(frozen=True)
class WorkerLocation:
    """The device that a worker runs on, and which of the processes on that device it is."""

    kind: str
    index: int
    process: int = 0
    """0: the process that owns the device. Others: further processes on the same device."""

    def __str__(self) -> str:
        beside = f" process {self.process}" if self.process else ""
        return f"{self.kind} {self.index}{beside}"

    @property
    def device_owner(self) -> WorkerLocation:
        """The location of the process that owns this device."""
        return WorkerLocation(self.kind, self.index)


class WorkerLink(Protocol):
    """One worker process, as the driver sees it."""

    @property
    def name(self) -> str: ...

    @property
    def location(self) -> WorkerLocation: ...

    @property
    def process_info(self) -> ProcessInfo: ...

    def ask(self, what: str, method: str, *args: object) -> Any:
        """Start a method of the worker. `ProcessPool.gather` waits for the result."""


class WorkerGroup(Group):
    """The workers of a device set, in rank order."""

    def __init__(self, pool: ProcessPool, device_set: DeviceSet) -> None:
        super().__init__(device_set.words, len(device_set.indices), pool.deadline_s, pool.connect_s)
        self.pool = pool
        self.device_set = device_set
        self.worker_refs = [
            pool.worker(WorkerLocation(device_set.kind, index, device_set.process)) for index in device_set.indices
        ]
        self.has_entered = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The address of each rank's machine. Waits until the workers have started."""
        return tuple(about.host for about in self.pool.ask(self.worker_refs, "starting the workers", "about"))

    def build(self, remote: Remote) -> type:
        if not self.has_entered:
            self._check_devices()
        if self.num_ranks > 1 and not self.has_entered:
            name = f"{self.name}, group {next(NUMBERS)}"
            self.pool.join(self.worker_refs, name, "enter", self.deadline_s + JOIN_MARGIN_S)
        self.has_entered = True
        role_class: type = self.pool.ask(self.worker_refs, f"building {remote.name}", "place", remote)[0]
        return role_class

    def device_kind(self) -> DeviceKind:
        """The kind of the device with the least memory that a rank has. Waits until the workers have started."""
        return min(self._kinds(), key=lambda kind: kind.memory_gib or 0.0)

    def _kinds(self) -> list[DeviceKind]:
        return self.pool.ask(self.worker_refs, "starting the workers", "device_kind")

    def _check_devices(self) -> None:
        """Refuses workers with devices of different kinds, or too small ones. Waits until all have started."""
        kinds = self._kinds()
        places = [f"{worker.location} of {worker.process_info.host}" for worker in self.worker_refs]
        check_same_kind(self.name, dict(zip(places, kinds, strict=True)), self.pool.allow_mixed_devices)
        if self.pool.check_device is not None and self.device_set.kind == "device":
            self.pool.check_device(self.device_set.devices, self.device_kind())

    def submit(self, role: str, method: str, call: Call) -> PendingCall[Any]:
        what = f"{role}.{method}"
        parts = split_call(
            what, self.marks[role][method], call, self.num_ranks, self.num_updates.get(role, self.pool.num_updates)
        )
        calls = {}
        # Calls of several threads reach all ranks in the same order: ranks that wait for each other make the same call.
        with self.pool.submitting:
            self.pool.move_rows(parts, self.worker_refs)
            for worker, part in zip(self.worker_refs, parts.calls, strict=False):  # a rank0 call has one part
                self.pool.traffic += num_bytes(part)
                calls[worker.ask(what, "call", role, method, part, self.pool.step)] = worker
        return PendingCall(partial(self._result, what, calls, parts), self.deadline_s)

    def _result(self, what: str, calls: Mapping[Any, WorkerLink], parts: SplitCall, deadline_s: float) -> Any:
        results = self.pool.gather(what, calls, deadline_s)
        self.pool.traffic += sum(map(num_bytes, results))
        return parts.merge(results)


class ProcessPool(Pool[WorkerGroup]):
    """Devices that have one worker process each.

    Args: those of `Pool`, and
        row_transport: how stored rows are sent between workers.
    """

    def __init__(self, num_devices: int, num_updates: int, deadline_s: float, row_transport: RowTransportName) -> None:
        super().__init__(num_devices, num_updates, deadline_s)
        self.row_transport = row_transport
        self.row_workers: set[str] = set()
        self.submitting = threading.Lock()
        """Held by the thread that submits a call to the workers of a group."""

    @abstractmethod
    def worker(self, location: WorkerLocation) -> WorkerLink:
        """The worker at a location."""

    @abstractmethod
    def all_workers(self) -> Sequence[WorkerLink]:
        """The workers that have started."""

    @abstractmethod
    def gather(self, what: str, calls: Mapping[Any, Any], deadline_s: float) -> list[Any]:
        """The results of calls, in order, by what `WorkerLink.ask` returned. Raises the first cause of a failure."""

    @abstractmethod
    def group_on(self, device_set: DeviceSet) -> WorkerGroup:
        """A group on a device set that no other group shares in part."""

    def num_workers(self) -> int:
        return len(self.all_workers())

    def new_group(self, device_set: DeviceSet) -> WorkerGroup:
        """A group whose workers start at once; the first `place` waits for them.

        Raises:
            ConfigError: 2020 when another group has some of its devices, but not all.
        """
        for other in self.groups:
            if (
                other.devices != device_set.devices
                and other.kind == device_set.kind
                and set(other.indices) & set(device_set.indices)
            ):
                raise IncompatibleError(
                    f"placements on {other.words} and on {device_set.words} share some devices but not all, and a "
                    "worker belongs to one group. Give both the same devices, or disjoint ones"
                )
        return self.group_on(device_set)

    def ask(self, workers: Sequence[WorkerLink], what: str, method: str, *args: object) -> list[Any]:
        """The results of a method on workers, in order."""
        return self.gather(what, {worker.ask(what, method, *args): worker for worker in workers}, self.deadline_s)

    def join(self, workers: Sequence[WorkerLink], name: str, method: str, timeout_s: float) -> None:
        """Make workers join the process group `name` by their `method`. They meet in a store on the first one.

        Workers that are busy or still start are waited for first, by the deadline of calls.

        Raises:
            RendezvousError: 10003 when they do not connect within `connect_s`.
        """
        members = self.ask(workers, f"waiting for the workers of {name}", "about")
        [address] = self.ask(workers[:1], f"opening the store of {name}", "host_store")
        meeting = Rendezvous(address, name, tuple(map(str, members)), self.connect_s, timeout_s)
        ranks = {worker.name: rank for rank, worker in enumerate(workers)}
        what = f"joining {name}"
        calls = {worker.ask(what, method, meeting, ranks): worker for worker in workers}
        with named_rendezvous():
            self.gather(what, calls, self.connect_s + MARGIN_S)

    def move_rows(self, parts: SplitCall, refs: Sequence[WorkerLink]) -> None:
        """Send the rows that the calls of `parts` read to their workers, if rows are sent over a process group."""
        if self.row_transport == "object_store":
            return
        names = [worker.name for worker in refs[: len(parts.calls)]]
        moves = plan_moves(parts.calls, names, parts.dispatch.unread)
        if not moves:
            return
        self._join_rows()
        moving = workers_of(moves)
        taking_part = [worker for worker in self.all_workers() if worker.name in moving]
        self.ask(taking_part, "moving rows", "exchange", moves)

    def _join_rows(self) -> None:
        """Join all workers of the pool in one process group, again whenever the set of workers has changed."""
        workers = self.all_workers()
        names = {worker.name for worker in workers}
        if self.row_workers != names:
            self.join(workers, "the rows", "join_rows", self.deadline_s)
            self.row_workers = names
