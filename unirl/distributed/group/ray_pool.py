"""The `ray` runtime: one worker process per device, and optionally a second one on the same device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError
from unirl.distributed.group.base import Pool
from unirl.distributed.group.dispatch import Dispatch, SplitCall, remote_methods, split_call
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.ray_cluster import connect, reserve, shut_down
from unirl.distributed.group.ray_group import Ref, WorkerGroup, WorkerLocation, WorkerRef
from unirl.distributed.group.remote import Remote
from unirl.distributed.group.worker import RankAssignment
from unirl.distributed.tensor.row_store import RowTransportName
from unirl.distributed.tensor.transports import plan_moves, workers_of

LIBRARIES = ("diffusers", "transformers", "peft")
NUMBERS = count()
JOIN_MARGIN_S = 60.0
"""Collectives time out this much later than the driver, whose error says more about the cause."""


@dataclass(frozen=True)
class RayPending:
    """A call that runs on the workers of a group."""

    what: str
    group: RayGroup
    calls: dict[Ref, WorkerRef]
    parts: SplitCall

    def result(self, deadline_s: float | None = None) -> Any:
        """The result; StallError (8001) when it has not come within `deadline_s` seconds (the group's, if absent)."""
        seconds = self.group.deadline_s if deadline_s is None else deadline_s
        results = self.group.pool.gather(self.what, self.calls, seconds)
        for result in results:
            self.group.pool.traffic.received(result)
        return self.parts.merge(results)


class RayGroup:
    """The workers of a device set, in rank order."""

    def __init__(self, pool: RayPool, device_set: DeviceSet) -> None:
        self.pool = pool
        self.name = device_set.words
        self.deadline_s = pool.deadline_s
        self.worker_refs = [
            pool.worker_group.worker(WorkerLocation(device_set.kind, index, device_set.process))
            for index in device_set.indices
        ]
        self.num_ranks = len(self.worker_refs)
        self.marks: dict[str, dict[str, Dispatch]] = {}
        self.has_entered = False

    @property
    def workers(self) -> tuple[Any, ...]:
        """The actors, in rank order."""
        return tuple(worker.actor for worker in self.worker_refs)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The address of each rank's machine."""
        self._enter()
        return tuple(worker.process_info.host for worker in self.worker_refs)

    def place(self, remote: Remote) -> Handle:
        """Build a role on every rank, beside its siblings, and return its handle."""
        self._enter()
        role_class = self._all(f"building {remote.name}", "place", remote)[0]
        self.marks[remote.name] = remote_methods(role_class)
        return Handle(self, remote.name, role_class)

    def role_here(self, role: str) -> None:
        """None: roles live in other processes."""

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and wait."""
        return self.submit(role, method, args, kwargs).result()

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RayPending:
        """Start a call and return at once."""
        what = f"{role}.{method}"
        parts = split_call(what, self.marks[role][method], (args, kwargs), self.num_ranks, self.pool.num_updates)
        self.pool.move_rows(parts.calls, self.worker_refs)
        calls = {}
        for worker, call in zip(self.worker_refs, parts.calls, strict=False):  # a rank0 call has one part
            self.pool.traffic.sent(call)
            calls[worker.ask(what, "call", role, method, *call, self.pool.step)] = worker
        return RayPending(what, self, calls, parts)

    def _enter(self) -> None:
        """Send every worker its rank. The ranks of a group with several workers meet in a store on rank 0."""
        if self.has_entered:
            return
        assignment = RankAssignment(group=f"{self.name}-{next(NUMBERS)}", world_size=self.num_ranks)
        if self.num_ranks > 1:
            what, first = "opening the store of ranks", self.worker_refs[0]
            [(host, port)] = self._wait(what, {first.ask(what, "host_store"): first})
            assignment = replace(assignment, host=host, port=port, timeout_s=self.deadline_s + JOIN_MARGIN_S)
        what = "joining the ranks"
        self._wait(what, {m.ask(what, "enter", replace(assignment, rank=i)): m for i, m in enumerate(self.worker_refs)})
        self.has_entered = True

    def _all(self, what: str, method: str, *args: Any) -> list[Any]:
        return self._wait(what, {worker.ask(what, method, *args): worker for worker in self.worker_refs})

    def _wait(self, what: str, calls: dict[Ref, WorkerRef]) -> list[Any]:
        return self.pool.gather(what, calls, self.deadline_s)


class RayPool(Pool):
    """Devices of a Ray cluster. Workers start when a group first needs them, and stay until `close`.

    Args:
        devices_per_node: devices on each machine. None: all devices are on one machine.
        preload: libraries that workers with a device import at the start.
        row_transport: how stored rows are sent between workers.
    """

    def __init__(
        self,
        num_devices: int,
        devices_per_node: int | None = None,
        num_updates: int = 1,
        deadline_s: float = 1800.0,
        preload: tuple[str, ...] = LIBRARIES,
        row_transport: RowTransportName = "object_store",
    ) -> None:
        super().__init__(num_devices, num_updates, deadline_s)
        self.owns_ray = connect(num_devices)
        self.groups: dict[DeviceSet, RayGroup] = {}
        self.is_closed = False
        self.phase = ""
        self.row_transport = row_transport
        self.row_workers: set[str] = set()
        try:
            self.reservation = reserve(num_devices, devices_per_node)
        except BaseException:
            self._leave_ray()
            raise
        self.worker_group = WorkerGroup(f"unirl-{os.getpid()}-{next(NUMBERS)}", self.reservation, deadline_s, preload)

    def group(self, device_set: DeviceSet) -> RayGroup:
        """The group on a device set. Its workers start at once; the first `place` waits for them.

        Raises:
            ConfigError: 2020 when another group has some of its devices, but not all.
        """
        self.check(device_set)
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
        if device_set not in self.groups:
            self.groups[device_set] = RayGroup(self, device_set)
        return self.groups[device_set]

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """Name the phase that the driver is in, for the message of a stall."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def gather(self, what: str, calls: dict[Ref, WorkerRef], deadline_s: float) -> list[Any]:
        """The results of calls on workers, in order. Errors name the phase that the driver is in."""
        during = f" (phase {self.phase})" if self.phase else ""
        return self.worker_group.gather(what + during, calls, deadline_s, self.stack_dir)

    def move_rows(self, calls: Sequence[Any], refs: Sequence[WorkerRef]) -> None:
        """Send the rows that `calls` read to their workers, if rows are sent over a process group."""
        if self.row_transport == "object_store":
            return
        moves = plan_moves(calls, [worker.name for worker in refs[: len(calls)]])
        if not moves:
            return
        workers = {worker.name: worker for worker in self.worker_group.worker_refs.values()}
        self._join_rows(workers)
        what, taking_part = "moving rows", [workers[name] for name in workers_of(moves)]
        self.gather(what, {worker.ask(what, "exchange", moves): worker for worker in taking_part}, self.deadline_s)

    def _join_rows(self, workers: Mapping[str, WorkerRef]) -> None:
        """Join all workers of the pool in one process group, again whenever the set of workers has changed."""
        if self.row_workers == set(workers):
            return
        what, first = "opening the store of rows", next(iter(workers.values()))
        [(host, port)] = self.gather(what, {first.ask(what, "host_rows"): first}, self.deadline_s)
        ranks = {name: rank for rank, name in enumerate(workers)}
        what, assignment = "joining the workers' process group", (host, port, ranks, self.deadline_s)
        joins = {worker.ask(what, "join_rows", *assignment): worker for worker in workers.values()}
        self.gather(what, joins, self.deadline_s)
        self.row_workers = set(workers)

    def release(self, step: int) -> None:
        """Free the stored rows of a step on every worker."""
        self.worker_group.tell("release", step)

    def memory(self) -> dict[str, float]:
        """The metrics `mem/*` in GiB: the maximum over workers, since the last call."""
        calls = {worker.ask("memory", "peak_memory"): worker for worker in self.worker_group.worker_refs.values()}
        peaks_by_name: dict[str, float] = {}
        for peaks in self.gather("memory", calls, self.deadline_s):
            peaks_by_name |= {name: max(gib, peaks_by_name.get(name, 0.0)) for name, gib in peaks.items()}
        return peaks_by_name

    def clear(self) -> None:
        """End all roles and groups and free all stored rows. Workers that answer stay; the others are killed."""
        self.groups.clear()
        self.row_workers = set()
        self.worker_group.tell("clear")

    def close(self) -> None:
        """Kill the workers and release the devices. A Ray cluster that this pool started ends as well."""
        if self.is_closed:
            return
        self.is_closed = True
        self.groups.clear()
        self.worker_group.kill(list(self.worker_group.worker_refs.values()))
        if not self.owns_ray:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.reservation.placement_group)
        self._leave_ray()

    def _leave_ray(self) -> None:
        if self.owns_ray:
            shut_down()
