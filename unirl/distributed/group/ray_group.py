"""The workers of a pool on Ray: starts them, calls them, watches them, and ends them when one fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import unirl
from unirl.distributed.group.failures import WorkerFailure, first_cause, stack_folder, stall
from unirl.distributed.group.ray_cluster import Reservation
from unirl.distributed.group.worker import ProcessInfo, RemoteWorker, describe, end_with_parent

GRACE_S = 1.0
"""Seconds that the other ranks have to report their failures after the first failure."""
CAUSE_S = 10.0
"""The same when the first failure is a broken connection: Ray reports the death of a machine after seconds."""
ANSWER_S = 5.0
"""Seconds that a worker has to answer with its stacks."""
CLEAR_S = 20.0
LONGEST = 600
"""Characters of Ray's report on a death, counted from its end: the message of an exception stands there."""

Ref = Any
"""A reference to a result in Ray, for which Ray has no public type."""


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


@dataclass(frozen=True, eq=False)
class WorkerRef:
    """One worker, as the driver sees it."""

    name: str
    location: WorkerLocation
    actor: Any
    life: Ref
    """A call that never returns and fails when the worker's process is gone."""
    process_info_ref: Ref

    @property
    def process_info(self) -> ProcessInfo:
        """Host and process id; pid 0 when the worker has not started."""
        import ray

        # With a timeout of 0, Ray may not report a result that is ready.
        done, _ = ray.wait([self.process_info_ref], timeout=0.2)
        try:
            process_info: ProcessInfo = ray.get(done[0]) if done else ProcessInfo("unknown", 0)
        except ray.exceptions.RayError:
            return ProcessInfo("unknown", 0)
        return process_info

    def __str__(self) -> str:
        return describe(str(self.location), self.process_info)

    def ask(self, what: str, method: str, *args: Any) -> Ref:
        """Start a method of the worker. `WorkerGroup.gather` waits for the result."""
        return self.actor.attempt.remote(what, method, *args)


class WorkerGroup:
    """All workers of a pool."""

    def __init__(self, name: str, reservation: Reservation, deadline_s: float, preload: Sequence[str]) -> None:
        self.name = name
        self.reservation = reservation
        self.deadline_s = deadline_s
        self.preload = tuple(preload)
        self.worker_refs: dict[WorkerLocation, WorkerRef] = {}
        self.numbers = count()

    def worker(self, location: WorkerLocation) -> WorkerRef:
        """The worker at a location, started if there is none. Waits only for the device's first process, if for any."""
        if location.process:
            self.worker(location.device_owner)
        if location not in self.worker_refs:
            self.kill([worker for worker in self.worker_refs.values() if worker.location.device_owner == location])
            self.worker_refs[location] = self._start(location, self._needs(location), self._environment(location))
        return self.worker_refs[location]

    def _needs(self, location: WorkerLocation) -> dict[str, int]:
        """The resources of a worker: the first process of a device takes the device, all others take nothing."""
        takes = {"num_cpus": 0, "num_gpus": 0}
        if location.kind == "device" and not location.process:
            takes["num_gpus" if self.reservation.resource == "GPU" else "num_cpus"] = 1
        return takes

    def _environment(self, location: WorkerLocation) -> dict[str, str]:
        environment = worker_environment(self.reservation.threads)
        if location.kind == "device" and location.process and self.reservation.resource == "GPU":
            first, what = self.worker_refs[location.device_owner], "asking for the GPU"
            [visible] = self.gather(what, {first.ask(what, "visible"): first}, self.deadline_s)
            # Ray gives this process no GPU and would hide all GPUs from it.
            environment |= {"CUDA_VISIBLE_DEVICES": visible, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        return environment

    def _start(self, location: WorkerLocation, needs: Mapping[str, int], environment: Mapping[str, str]) -> WorkerRef:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        held, has_device = self.reservation, location.kind == "device"
        bundle = location.index // held.per_node if has_device else location.index % held.placement_group.bundle_count
        name = f"{self.name}-{next(self.numbers)}-{str(location).replace(' ', '-')}"
        actor = (
            actor_class()
            .options(
                name=name,
                **needs,
                scheduling_strategy=PlacementGroupSchedulingStrategy(held.placement_group, bundle),
                runtime_env={"env_vars": environment},
            )
            .remote(name, str(location), has_device, self.deadline_s)
        )
        if has_device and self.preload:
            actor.preload.remote(self.preload)
        return WorkerRef(name, location, actor, actor.live.remote(), actor.about.remote())

    def gather(
        self, what: str, calls: Mapping[Ref, WorkerRef], deadline_s: float, stack_dir: Path | None = None
    ) -> list[Any]:
        """The results of calls, in order. Raises the first cause when a call fails or any worker of the pool dies.

        Workers that do not return after a failure are killed: they may wait for a rank that never comes.

        Args:
            stack_dir: the folder for stack dumps when the deadline passes.
        """
        import ray

        results: dict[Ref, Any] = {}
        failures: list[WorkerFailure] = []
        end = time.monotonic() + deadline_s
        while len(results) < len(calls):
            lives = {worker.life: worker for worker in self.worker_refs.values()}
            waiting = [ref for ref in calls if ref not in results]
            done, _ = ray.wait([*waiting, *lives], num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not done:
                break
            ref = done[0]
            outcome = self._outcome(what, ref, lives.get(ref) or calls[ref])
            if ref in calls:
                results[ref] = outcome
            if isinstance(outcome, WorkerFailure):
                failures.append(outcome)
                end = min(end, time.monotonic() + (CAUSE_S if outcome.is_consequence else GRACE_S))
        missing = [worker for ref, worker in calls.items() if ref not in results]
        if failures:
            self.kill(missing)
            raise first_cause(failures).exception()
        if missing:
            folder = stack_folder(stack_dir)
            raise stall(what, deadline_s, self._write_stacks(folder), folder)
        return [results[ref] for ref in calls]

    def _outcome(self, what: str, ref: Ref, worker: WorkerRef) -> Any:
        """The result of a call, or its WorkerFailure."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            how = how_it_died(_verdict(worker) or error)
            self.forget([worker])
            return WorkerFailure.death(what, str(worker), how)
        except ray.exceptions.RayError as error:  # arguments or result could not be sent
            return WorkerFailure.of(error, what, str(worker))

    def _write_stacks(self, folder: Path) -> dict[str, str]:
        """Write the stacks of every worker to a file, and return the innermost call of each."""
        import ray

        asked = {worker.actor.stacks.remote(): worker for worker in self.worker_refs.values()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        positions = {str(worker): f"did not answer within {ANSWER_S:g} s" for worker in asked.values()}
        for ref in answered:
            try:
                stacks = ray.get(ref)
            except ray.exceptions.RayError as error:
                positions[str(asked[ref])] = f"is gone: {how_it_died(error)}"
                continue
            positions[str(asked[ref])] = stacks.where
            (folder / f"{str(asked[ref].location).replace(' ', '-')}.txt").write_text(stacks.text, encoding="utf-8")
        return positions

    def tell(self, method: str, *args: Any) -> None:
        """Call a method on every worker and wait. Kill the workers that fail or do not answer."""
        import ray

        asked = {worker.ask(method, method, *args): worker for worker in self.worker_refs.values()}
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
        self.forget(refs)

    def forget(self, refs: Sequence[WorkerRef]) -> None:
        """Remove workers that are gone."""
        self.worker_refs = {location: worker for location, worker in self.worker_refs.items() if worker not in refs}


@cache
def actor_class() -> Any:
    """RemoteWorker as an actor class of Ray. Calls of the driver run one by one; reads and stack dumps, in parallel."""
    import ray

    class Actor(RemoteWorker):
        def __init__(self, name: str, location: str, has_device: bool, deadline_s: float) -> None:
            end_with_parent()
            super().__init__(name, location, ray.util.get_node_ip_address(), has_device, deadline_s)

        read = ray.method(concurrency_group="io")(RemoteWorker.read)
        stacks = ray.method(concurrency_group="io")(RemoteWorker.stacks)
        live = ray.method(concurrency_group="life")(RemoteWorker.live)

    # Ray shows one of these names while the process waits and the other while it works.
    Actor.__name__ = Actor.__qualname__ = "Worker"
    return ray.remote(concurrency_groups={"io": 4, "life": 1}, max_restarts=0, max_task_retries=0)(Actor)


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker's process: the driver's modules, and its share of the cores."""
    root = str(Path(unirl.__file__).resolve().parents[1])
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    paths = dict.fromkeys([root, *(str(Path(path).resolve()) for path in own)])
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}


def _verdict(worker: WorkerRef) -> Exception | None:
    """Ray's report on a worker whose connection is lost. It may take some seconds."""
    import ray

    done, _ = ray.wait([worker.life], timeout=ANSWER_S)
    try:
        ray.get(done)
    except ray.exceptions.RayActorError as error:
        return error
    return None


def how_it_died(error: Exception) -> str:
    """Ray's report on a death, without its list of common causes."""
    text = " ".join(str(error).split("Some common causes")[0].split())
    for start in ("The actor is dead because", "The actor died because"):
        text = text.split(start)[-1].strip()
    return text[-LONGEST:]
