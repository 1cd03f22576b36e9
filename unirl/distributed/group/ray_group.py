"""The workers of a pool on Ray: started, called, watched, and ended when one of them fails."""

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
"""How long other ranks may take to say what went wrong with them, once one has."""
CAUSE_S = 10.0
"""The same, when all that is known is that a connection broke: the death of a machine shows after seconds."""
ANSWER_S = 5.0
"""How long a worker may take to say where it stands."""
CLEAR_S = 20.0
LONGEST = 600
"""Characters of what is said about a death: its end, where an exception of the start of a worker has its message."""

Ref = Any
"""A reference to a result of Ray, which has no public type."""


@dataclass(frozen=True)
class WorkerLocation:
    """Where a worker belongs."""

    kind: str
    index: int
    process: int = 0
    """0 = the process that holds the device, others stand beside it on the same device."""

    def __str__(self) -> str:
        beside = f" process {self.process}" if self.process else ""
        return f"{self.kind} {self.index}{beside}"

    @property
    def holder(self) -> WorkerLocation:
        """The place of the first process of this device."""
        return WorkerLocation(self.kind, self.index)


@dataclass(frozen=True, eq=False)
class WorkerRef:
    """One worker."""

    name: str
    place: WorkerLocation
    actor: Any
    life: Ref
    """Resolves when the worker's process is gone, and never before."""
    facts: Ref

    @property
    def about(self) -> ProcessInfo:
        """Its process; pid 0 when it has not started."""
        import ray

        # Without any patience Ray may not yet report what is ready.
        done, _ = ray.wait([self.facts], timeout=0.2)
        try:
            about: ProcessInfo = ray.get(done[0]) if done else ProcessInfo("unknown", 0)
        except ray.exceptions.RayError:
            return ProcessInfo("unknown", 0)
        return about

    def __str__(self) -> str:
        return describe(str(self.place), self.about)

    def ask(self, what: str, method: str, *args: Any) -> Ref:
        """Start a method of the worker, to be waited for by `WorkerGroup.gather`."""
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

    def worker(self, place: WorkerLocation) -> WorkerRef:
        """The worker on a place, started if there is none. Waits for the device's first process alone, if for any."""
        if place.process:
            self.worker(place.holder)
        if place not in self.worker_refs:
            self.kill([worker for worker in self.worker_refs.values() if worker.place.holder == place])
            self.worker_refs[place] = self._start(place, self._needs(place), self._environment(place))
        return self.worker_refs[place]

    def _needs(self, place: WorkerLocation) -> dict[str, int]:
        """What a worker takes of its bundle: the first process of a device takes it, all others nothing."""
        takes = {"num_cpus": 0, "num_gpus": 0}
        if place.kind == "device" and not place.process:
            takes["num_gpus" if self.reservation.resource == "GPU" else "num_cpus"] = 1
        return takes

    def _environment(self, place: WorkerLocation) -> dict[str, str]:
        found = worker_environment(self.reservation.threads)
        if place.kind == "device" and place.process and self.reservation.resource == "GPU":
            first, what = self.worker_refs[place.holder], "asking for the GPU"
            [visible] = self.gather(what, {first.ask(what, "visible"): first}, self.deadline_s)
            # To Ray this process has no GPU, and it may hide them all from such ones.
            found |= {"CUDA_VISIBLE_DEVICES": visible, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        return found

    def _start(self, place: WorkerLocation, needs: Mapping[str, int], environment: Mapping[str, str]) -> WorkerRef:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        held, has_device = self.reservation, place.kind == "device"
        bundle = place.index // held.per_node if has_device else place.index % held.placement_group.bundle_count
        name = f"{self.name}-{next(self.numbers)}-{str(place).replace(' ', '-')}"
        actor = (
            actor_class()
            .options(
                name=name,
                **needs,
                scheduling_strategy=PlacementGroupSchedulingStrategy(held.placement_group, bundle),
                runtime_env={"env_vars": environment},
            )
            .remote(name, str(place), has_device, self.deadline_s)
        )
        if has_device and self.preload:
            actor.preload.remote(self.preload)
        return WorkerRef(name, place, actor, actor.live.remote(), actor.about.remote())

    def gather(
        self, what: str, calls: Mapping[Ref, WorkerRef], deadline_s: float, stack_dir: Path | None = None
    ) -> list[Any]:
        """The results of calls, in order. The first cause is raised when one fails or any worker dies.

        Workers that do not return then are killed: they may wait for one that never comes.

        Args:
            stack_dir: where stacks are written when the deadline passes.
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
        """What a call gave, or the WorkerFailure that stands for it."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            how = how_it_died(_verdict(worker) or error)
            self.forget([worker])
            return WorkerFailure.death(what, str(worker), how)
        except ray.exceptions.RayError as error:  # the call or its result did not travel
            return WorkerFailure.of(error, what, str(worker))

    def _write_stacks(self, folder: Path) -> dict[str, str]:
        """The stacks of every worker as files; gives where each one stands."""
        import ray

        asked = {worker.actor.stacks.remote(): worker for worker in self.worker_refs.values()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        places = {str(worker): f"did not answer within {ANSWER_S:g} s" for worker in asked.values()}
        for ref in answered:
            try:
                stacks = ray.get(ref)
            except ray.exceptions.RayError as error:
                places[str(asked[ref])] = f"is gone: {how_it_died(error)}"
                continue
            places[str(asked[ref])] = stacks.where
            (folder / f"{str(asked[ref].place).replace(' ', '-')}.txt").write_text(stacks.text, encoding="utf-8")
        return places

    def tell(self, method: str, *args: Any) -> None:
        """Call a method on every worker and wait; one that fails or does not answer is ended."""
        import ray

        asked = {worker.ask(method, method, *args): worker for worker in self.worker_refs.values()}
        if not asked:
            return
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=CLEAR_S)
        failed = [ref for ref in done if isinstance(self._outcome(method, ref, asked[ref]), WorkerFailure)]
        self.kill([asked[ref] for ref in [*late, *failed]])

    def kill(self, refs: Sequence[WorkerRef]) -> None:
        """End workers at once, whatever they do. The next call to their place starts another."""
        import ray

        here = ray.util.get_node_ip_address()
        for worker in refs:
            if worker.about.host == here and not ray.wait([worker.life], timeout=0)[0]:
                # Ray asks the process to end itself, which one that is stopped does not do.
                with suppress(ProcessLookupError):
                    os.kill(worker.about.pid, signal.SIGKILL)
            ray.kill(worker.actor, no_restart=True)
        self.forget(refs)

    def forget(self, refs: Sequence[WorkerRef]) -> None:
        """Take workers that are gone off the list."""
        self.worker_refs = {place: worker for place, worker in self.worker_refs.items() if worker not in refs}


@cache
def actor_class() -> Any:
    """RemoteWorker as an actor of Ray. Calls of the driver run one by one; reads and stacks beside them."""
    import ray

    class Actor(RemoteWorker):
        def __init__(self, name: str, place: str, has_device: bool, deadline_s: float) -> None:
            end_with_parent()
            super().__init__(name, place, ray.util.get_node_ip_address(), has_device, deadline_s)

        read = ray.method(concurrency_group="io")(RemoteWorker.read)
        stacks = ray.method(concurrency_group="io")(RemoteWorker.stacks)
        live = ray.method(concurrency_group="life")(RemoteWorker.live)

    # Ray names the process after one of them while it waits, and after the other while it works.
    Actor.__name__ = Actor.__qualname__ = "Worker"
    return ray.remote(concurrency_groups={"io": 4, "life": 1}, max_restarts=0, max_task_retries=0)(Actor)


def worker_environment(threads: int) -> dict[str, str]:
    """What a worker's process finds: the same modules as the driver, and its share of the cores."""
    root = str(Path(unirl.__file__).resolve().parents[1])
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    paths = dict.fromkeys([root, *(str(Path(path).resolve()) for path in own)])
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}


def _verdict(worker: WorkerRef) -> Exception | None:
    """What Ray knows about a worker whose connection is lost, which may take it some seconds to find out."""
    import ray

    done, _ = ray.wait([worker.life], timeout=ANSWER_S)
    try:
        ray.get(done)
    except ray.exceptions.RayActorError as error:
        return error
    return None


def how_it_died(error: Exception) -> str:
    """Ray's own words about a death, without its list of what may have been."""
    text = " ".join(str(error).split("Some common causes")[0].split())
    for start in ("The actor is dead because", "The actor died because"):
        text = text.split(start)[-1].strip()
    return text[-LONGEST:]
