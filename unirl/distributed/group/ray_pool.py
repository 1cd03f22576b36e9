"""The `ray` runtime: one worker process per device, and optionally a second one on the same device."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from unirl.config.device_sets import DeviceSet
from unirl.config.node_groups import NodeGroups
from unirl.distributed.group.deadlines import LearnedDeadlines
from unirl.distributed.group.failures import ThreadStacks, WorkerFailure, first_cause, stall
from unirl.distributed.group.process_pool import NUMBERS, ProcessPool, WorkerGroup, WorkerLocation
from unirl.distributed.group.ray_cluster import connect, lost_raylet, reserve, shut_down, stop_listening
from unirl.distributed.group.ray_worker import ANSWER_S, WorkerRef, how_it_died
from unirl.distributed.tensor.row_store import RowTransportName
from unirl.distributed.tensor.transports import RowConnection, RowService

if TYPE_CHECKING:
    from ray import ObjectRef

LIBRARIES = ("diffusers", "transformers", "peft")
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


class RayGroup(WorkerGroup):
    """Workers that are actors of Ray."""

    def __init__(self, pool: RayPool, device_set: DeviceSet) -> None:
        super().__init__(pool, device_set)
        self.workers = tuple(pool.worker(worker.location).actor for worker in self.worker_refs)


class RayPool(ProcessPool):
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
        super().__init__(num_devices, num_updates, deadline_s, row_transport)
        self.owns_ray = connect(num_devices + (0 if row_service is None else row_service.num_slots))
        self.preload = preload
        self.is_closed = False
        self.learned = LearnedDeadlines()
        self.awaited: WorkerRef | None = None
        """The first worker of the call that the driver waits for."""
        self.worker_refs: dict[WorkerLocation, WorkerRef] = {}
        self.row_service = row_service
        self.connection: RowConnection | None = None
        try:
            if row_service is not None:  # before the devices, which may be all slots of the cluster that are left
                self.connection = row_service.start(num_devices)
            self.reservation = reserve(num_devices, devices_per_node, threads, node_groups)
        except BaseException:
            self._stop_row_service()
            self._leave_ray()
            raise

    def group_on(self, device_set: DeviceSet) -> RayGroup:
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

    def all_workers(self) -> list[WorkerRef]:
        return list(self.worker_refs.values())

    def gather(self, what: str, calls: Mapping[ObjectRef, WorkerRef], deadline_s: float) -> list[Any]:
        """The results of calls, in order. Raises the first cause when a call fails or any worker of the pool dies.

        The deadline is for the time without progress of each rank that has not returned. The workers are asked for it
        only when so much time has passed. A worker that has started and does not even answer is frozen; it is found
        earlier, after ten times the median duration of the same call (`LearnedDeadlines`).

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
        """Seconds without progress of each rank that is waited for, and the ranks whose running worker does not answer.

        A worker that still starts cannot answer, and how long it takes does not follow from earlier calls.

        Args:
            asked_s: the time since the call, which is the most that a rank can have been silent.
        """
        import ray

        names = {ref: f"rank {rank}, {worker}" for rank, (ref, worker) in enumerate(calls.items()) if ref in waiting}
        running = {name for ref, name in names.items() if calls[ref].process_info.pid}
        asked = {calls[ref].actor.silent_s.remote(): name for ref, name in names.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        silent = dict.fromkeys(asked.values(), asked_s)  # a worker that does not answer makes no progress
        for ref in answered:
            with suppress(ray.exceptions.RayError):  # it is gone, as `ray.wait` will say
                silent[asked[ref]] = min(ray.get(ref), asked_s)
        return silent, running - {asked[ref] for ref in answered}

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
