"""The `ray` runtime: one worker process per device, and optionally a second one on the same device."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError
from unirl.config.node_groups import NodeGroups
from unirl.distributed.group.base import Pool, num_bytes
from unirl.distributed.group.deadlines import LearnedDeadlines
from unirl.distributed.group.dispatch import Call, SplitCall, split_call
from unirl.distributed.group.failures import ThreadStacks, WorkerFailure, first_cause, stall
from unirl.distributed.group.handle import Group, PendingCall, Remote
from unirl.distributed.group.lockstep import check_same_kind
from unirl.distributed.group.ray_cluster import connect, lost_raylet, reserve, shut_down, stop_listening
from unirl.distributed.group.ray_worker import ANSWER_S, WorkerLocation, WorkerRef, how_it_died
from unirl.distributed.group.rendezvous import MARGIN_S, Rendezvous, named_rendezvous
from unirl.distributed.tensor.row_store import RowTransportName
from unirl.distributed.tensor.transports import RowConnection, RowService, plan_moves, workers_of
from unirl.types.device import DeviceKind

if TYPE_CHECKING:
    from ray import ObjectRef

LIBRARIES = ("diffusers", "transformers", "peft")
NUMBERS = count()
JOIN_MARGIN_S = 60.0
"""Collectives time out this much later than the driver, whose error says more about the cause."""
GRACE_S = 1.0
"""Seconds that the other ranks have to report their failures after the first failure."""
CAUSE_S = 10.0
"""The same when the first failure is a broken connection: Ray reports the death of a machine after seconds."""
CLEAR_S = 20.0
JOIN_S = 10.0
"""Seconds that a thread of the driver has to notice that the workers are gone."""
MIN_WAIT_S = 0.05
"""Seconds between two questions to the workers whether they make progress."""
STATUS_S = 1.0
"""Seconds that a worker has to say what it counts."""


class RayGroup(Group):
    """The workers of a device set, in rank order."""

    def __init__(self, pool: RayPool, device_set: DeviceSet) -> None:
        super().__init__(device_set.words, len(device_set.indices), pool.deadline_s, pool.connect_s)
        self.pool = pool
        self.device_set = device_set
        self.worker_refs = [
            pool.worker(WorkerLocation(device_set.kind, index, device_set.process)) for index in device_set.indices
        ]
        self.workers = tuple(worker.actor for worker in self.worker_refs)
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

    def _result(self, what: str, calls: Mapping[ObjectRef, WorkerRef], parts: SplitCall, deadline_s: float) -> Any:
        results = self.pool.gather(what, calls, deadline_s)
        self.pool.traffic += sum(map(num_bytes, results))
        return parts.merge(results)


class RayPool(Pool[RayGroup]):
    """Devices of a Ray cluster. Workers start when a group first needs them, and stay until `close`.

    Args: those of `open_pool`, and
        preload: libraries that workers with a device import at the start.
    """

    def __init__(
        self,
        num_devices: int,
        devices_per_node: int | None = None,
        num_updates: int = 1,
        deadline_s: float = 1800.0,
        preload: tuple[str, ...] = LIBRARIES,
        row_transport: RowTransportName = "object_store",
        threads: int | None = None,
        row_service: RowService | None = None,
        node_groups: NodeGroups | None = None,
    ) -> None:
        super().__init__(num_devices, num_updates, deadline_s)
        self.owns_ray = connect(num_devices + (0 if row_service is None else row_service.num_slots))
        self.preload = preload
        self.is_closed = False
        self.learned = LearnedDeadlines()
        self.awaited: WorkerRef | None = None
        """The first worker of the call that the driver waits for."""
        self.worker_refs: dict[WorkerLocation, WorkerRef] = {}
        self.row_transport = row_transport
        self.row_workers: set[str] = set()
        self.row_service = row_service
        self.connection: RowConnection | None = None
        self.submitting = threading.Lock()
        """Held by the thread that submits a call to the workers of a group."""
        try:
            if row_service is not None:  # before the devices, which may be all slots of the cluster that are left
                self.connection = row_service.start(num_devices)
            self.reservation = reserve(num_devices, devices_per_node, threads, node_groups)
        except BaseException:
            self._stop_row_service()
            self._leave_ray()
            raise

    def new_group(self, device_set: DeviceSet) -> RayGroup:
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
        return RayGroup(self, device_set)

    def worker(self, location: WorkerLocation) -> WorkerRef:
        """The worker at a location, started if there is none. Waits only for the device's first process, if for any."""
        if location.process:
            self.worker(location.device_owner)
        if location not in self.worker_refs:
            self.kill([worker for worker in self.worker_refs.values() if worker.location.device_owner == location])
            name = f"unirl-{os.getpid()}-{next(NUMBERS)}-{str(location).replace(' ', '-')}"
            environment = self._environment(location)
            worker = WorkerRef.start(name, location, self.reservation, environment, self.deadline_s, self.connection)
            if location.kind == "device" and self.preload:
                worker.actor.preload.remote(self.preload)
            self.worker_refs[location] = worker
        return self.worker_refs[location]

    def _environment(self, location: WorkerLocation) -> dict[str, str]:
        if location.kind != "device" or not location.process:
            return {}
        if self.reservation.bundles[self.reservation.bundle_of(location.kind, location.index)].resource != "GPU":
            return {}
        [visible] = self.ask([self.worker_refs[location.device_owner]], "asking for the GPU", "visible")
        # Ray gives this process no GPU and would hide all GPUs from it.
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        with self.in_phase(phase):
            yield

    def status(self) -> str:
        """What the first worker of the call that runs counts; the call itself if none answers at once."""
        import ray

        awaited = self.awaited
        if awaited is None:
            return super().status()
        with suppress(ray.exceptions.RayError):  # the worker is busy or gone, as the driver's own call will say
            status: str = ray.get(awaited.actor.status.remote(), timeout=STATUS_S)
            return status
        return super().status()

    def num_workers(self) -> int:
        return len(self.worker_refs)

    def ask(self, workers: Sequence[WorkerRef], what: str, method: str, *args: object) -> list[Any]:
        """The results of a method on workers, in order."""
        return self.gather(what, {worker.ask(what, method, *args): worker for worker in workers}, self.deadline_s)

    def join(self, workers: Sequence[WorkerRef], name: str, method: str, timeout_s: float) -> None:
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

    def gather(self, what: str, calls: Mapping[ObjectRef, WorkerRef], deadline_s: float) -> list[Any]:
        """The results of calls, in order. Raises the first cause when a call fails or any worker of the pool dies.

        The deadline is for the time without progress of each rank that has not returned. The workers are asked for it
        only when so much time has passed. A worker whose process does not even answer is frozen; it is found earlier,
        after ten times the median duration of the same call (`LearnedDeadlines`).

        Workers that do not return after a failure are killed: they may wait for a rank that never comes. Errors name
        the phase that the driver is in.
        """
        import ray

        what += f" (phase {self.phase})" if self.phase else ""
        results: dict[ObjectRef, object] = {}
        failures: list[WorkerFailure] = []
        ended: set[ObjectRef] = set()
        """The lives of workers that have ended. Ray would report them again at once."""
        begin = time.monotonic()
        frozen_s = min(deadline_s, self.learned.limit_s(what))
        end = begin + frozen_s
        stuck: list[str] = []
        self.awaited = next(iter(calls.values()), None)
        self.heartbeat.begin(what)
        while len(results) < len(calls):
            lives = {worker.life: worker for worker in self.worker_refs.values() if worker.life not in ended}
            waiting = [ref for ref in calls if ref not in results]
            done, _ = ray.wait([*waiting, *lives], num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not done:
                if failures:
                    break
                silent, frozen = self._silence(calls, waiting, time.monotonic() - begin)
                left = {rank: (frozen_s if rank in frozen else deadline_s) - silent[rank] for rank in silent}
                stuck = [rank for rank, seconds in left.items() if seconds <= 0]
                if stuck:
                    deadline_s = frozen_s if frozen.issuperset(stuck) else deadline_s
                    break
                end = time.monotonic() + max(min(*left.values(), frozen_s), MIN_WAIT_S)
                continue
            ref = done[0]
            outcome = self._outcome(what, ref, lives.get(ref) or calls[ref])
            if ref in calls:
                results[ref] = outcome
            else:
                ended.add(ref)
            if isinstance(outcome, WorkerFailure):
                failures.append(outcome)
                end = min(end, time.monotonic() + (CAUSE_S if outcome.is_consequence else GRACE_S))
        self.awaited = None
        missing = [worker for ref, worker in calls.items() if ref not in results]
        if failures:
            self.kill(missing)
            raise first_cause(failures).exception()
        if missing:
            raise stall(what, deadline_s, self._stacks(), self.stack_dir, stuck)
        self.learned.note(what, time.monotonic() - begin)
        return [results[ref] for ref in calls]

    def _outcome(self, what: str, ref: ObjectRef, worker: WorkerRef) -> object:
        """The result of a call, or its WorkerFailure."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            how = lost_raylet() or worker.how_it_died(error)
            self._forget([worker])
            return WorkerFailure(what=what, worker=str(worker), message=how, is_death=True)
        except ray.exceptions.RayError as error:  # arguments or result could not be sent
            return WorkerFailure.of(error, what, str(worker))

    def _silence(
        self, calls: Mapping[ObjectRef, WorkerRef], waiting: Sequence[ObjectRef], asked_s: float
    ) -> tuple[dict[str, float], set[str]]:
        """Seconds without progress of each rank that is waited for, and the ranks that do not answer.

        Args:
            asked_s: the time since the call, which is the most that a rank can have been silent.
        """
        import ray

        names = {ref: f"rank {rank}, {worker}" for rank, (ref, worker) in enumerate(calls.items()) if ref in waiting}
        asked = {calls[ref].actor.silent_s.remote(): name for ref, name in names.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        silent = dict.fromkeys(asked.values(), asked_s)  # a worker that does not answer makes no progress
        for ref in answered:
            with suppress(ray.exceptions.RayError):  # it is gone, as `ray.wait` will say
                silent[asked[ref]] = min(ray.get(ref), asked_s)
        return silent, {name for ref, name in asked.items() if ref not in answered}

    def _stacks(self) -> dict[str, ThreadStacks]:
        """The stacks of every worker, by its name in messages."""
        import ray

        asked = {worker.actor.stacks.remote(): worker for worker in self.worker_refs.values()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        stacks = {str(worker): ThreadStacks(f"did not answer within {ANSWER_S:g} s") for worker in asked.values()}
        for ref in answered:
            try:
                stacks[str(asked[ref])] = ray.get(ref)
            except ray.exceptions.RayError as error:
                stacks[str(asked[ref])] = ThreadStacks(f"is gone: {how_it_died(error)}")
        return stacks

    def tell(self, method: str, *args: object) -> None:
        """Call a method on every worker and wait. Kill the workers that fail or do not answer."""
        self._await_told(method, {each.ask(method, method, *args): each for each in self.worker_refs.values()})

    def _await_told(self, method: str, asked: Mapping[ObjectRef, WorkerRef]) -> None:
        import ray

        if not asked:
            return
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=CLEAR_S)
        failed = [ref for ref in done if isinstance(self._outcome(method, ref, asked[ref]), WorkerFailure)]
        self.kill([asked[ref] for ref in [*late, *failed]])

    def kill(self, refs: Sequence[WorkerRef]) -> None:
        """Kill workers at once. The next call at their location starts a new worker."""
        import ray

        here = ray.util.get_node_ip_address()
        for worker in refs:
            if worker.process_info.host == here and not ray.wait([worker.life], timeout=0)[0]:
                # Ray asks the process to end itself, which a stopped process does not do.
                with suppress(ProcessLookupError):
                    os.kill(worker.process_info.pid, signal.SIGKILL)
            ray.kill(worker.actor, no_restart=True)
        self._forget(refs)

    def _forget(self, gone: Sequence[WorkerRef]) -> None:
        self.worker_refs = {location: worker for location, worker in self.worker_refs.items() if worker not in gone}

    def move_rows(self, parts: SplitCall, refs: Sequence[WorkerRef]) -> None:
        """Send the rows that the calls of `parts` read to their workers, if rows are sent over a process group."""
        if self.row_transport == "object_store":
            return
        names = [worker.name for worker in refs[: len(parts.calls)]]
        moves = plan_moves(parts.calls, names, parts.dispatch.unread)
        if not moves:
            return
        self._join_rows()
        moving = workers_of(moves)
        taking_part = [worker for worker in self.worker_refs.values() if worker.name in moving]
        self.ask(taking_part, "moving rows", "exchange", moves)

    def _join_rows(self) -> None:
        """Join all workers of the pool in one process group, again whenever the set of workers has changed."""
        workers = list(self.worker_refs.values())
        names = {worker.name for worker in workers}
        if self.row_workers != names:
            self.join(workers, "the rows", "join_rows", self.deadline_s)
            self.row_workers = names

    def release(self, step: int) -> None:
        self._await_told("release", {each.actor.release.remote(step): each for each in self.worker_refs.values()})

    def memory(self) -> dict[str, float]:
        peaks_by_name: dict[str, float] = {}
        asked = {worker.actor.peak_memory.remote(): worker for worker in self.worker_refs.values()}
        for peaks in self.gather("memory", asked, self.deadline_s):
            peaks_by_name |= {name: max(gib, peaks_by_name.get(name, 0.0)) for name, gib in peaks.items()}
        return peaks_by_name

    def clear(self) -> None:
        """End all roles and groups and free all stored rows. Workers that answer stay; the others are killed."""
        self.groups.clear()
        self.row_workers = set()
        self.tell("clear")

    def close(self) -> None:
        """Kill the workers and release the devices. A Ray cluster that this pool started ends as well."""
        if self.is_closed:
            return
        self.is_closed = True
        self.groups.clear()
        if self.owns_ray:
            stop_listening()
        self.kill(list(self.worker_refs.values()))
        self.join_threads(JOIN_S)
        self._stop_row_service()
        if not self.owns_ray:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.reservation.placement_group)
        self._leave_ray()

    def _stop_row_service(self) -> None:
        """End the service that carries rows, if this pool started one."""
        if self.row_service is not None and self.connection is not None:
            self.row_service.stop()

    def _leave_ray(self) -> None:
        if self.owns_ray:
            shut_down()
