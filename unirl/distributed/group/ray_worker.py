"""A worker process on Ray, as the driver sees it: where it runs, how it starts, and how it died."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import unirl
from unirl.distributed.group.process_pool import WorkerLocation
from unirl.distributed.group.ray_cluster import Reservation
from unirl.distributed.group.worker import ProcessInfo, RemoteWorker, end_with_parent
from unirl.distributed.tensor.transports import RowConnection

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorClass, ActorHandle

ANSWER_S = 5.0
"""Seconds that a worker has to answer with its stacks, and Ray to report why a worker died."""
LONGEST = 600
"""Characters of Ray's report on a death, counted from its end: the message of an exception stands there."""


@dataclass(frozen=True, eq=False)
class WorkerRef:
    """One worker, as the driver sees it."""

    name: str
    location: WorkerLocation
    actor: ActorHandle
    life: ObjectRef
    """A call that never returns and fails when the worker's process is gone."""
    process_info_ref: ObjectRef

    @staticmethod
    def start(
        name: str,
        location: WorkerLocation,
        held: Reservation,
        environment: dict[str, str],
        deadline_s: float,
        connection: RowConnection | None = None,
    ) -> WorkerRef:
        """Start a worker. The first process of a device takes the device, all others take nothing."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        has_device = location.kind == "device"
        position = held.bundle_of(location.kind, location.index)
        bundle = held.bundles[position]
        takes = int(has_device and not location.process)
        runtime_env: dict[str, object] = {
            "env_vars": worker_environment(held.threads) | dict(bundle.env_vars) | environment
        }
        if bundle.python is not None:
            runtime_env["py_executable"] = bundle.python
        actor = (
            actor_class()
            .options(
                name=name,
                num_cpus=takes if bundle.resource == "CPU" else 0,
                num_gpus=takes if bundle.resource == "GPU" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(held.placement_group, position),
                runtime_env=runtime_env,
            )
            .remote(name, str(location), has_device, deadline_s, connection)
        )
        return WorkerRef(name, location, actor, actor.live.remote(), actor.about.remote())

    @property
    def process_info(self) -> ProcessInfo:
        """Host and process id; pid 0 when the worker has not started."""
        import ray

        # With a timeout of 0, Ray may not report a result that is ready.
        done, _ = ray.wait([self.process_info_ref], timeout=0.2)
        with suppress(ray.exceptions.RayError):
            if done:
                process_info: ProcessInfo = ray.get(done[0])
                return process_info
        return ProcessInfo(str(self.location))

    def __str__(self) -> str:
        return str(self.process_info)

    def ask(self, what: str, method: str, *args: object) -> ObjectRef:
        """Start a method of the worker. `RayPool.gather` waits for the result."""
        return self.actor.attempt.remote(what, method, *args)

    def how_it_died(self, error: Exception) -> str:
        """Ray's report on the death of this worker, which may take some seconds. `error` if there is none."""
        import ray

        done, _ = ray.wait([self.life], timeout=ANSWER_S)
        try:
            ray.get(done)
        except ray.exceptions.RayActorError as verdict:
            return how_it_died(verdict)
        return how_it_died(error)


@cache
def actor_class() -> ActorClass[RemoteWorker]:
    """RemoteWorker as an actor class of Ray. Calls of the driver run one by one; reads and questions, in parallel."""
    import ray

    class Actor(RemoteWorker):
        def __init__(
            self, name: str, location: str, has_device: bool, deadline_s: float, connection: RowConnection | None
        ) -> None:
            end_with_parent()
            super().__init__(name, location, ray.util.get_node_ip_address(), has_device, deadline_s, connection)

        read = ray.method(concurrency_group="io")(RemoteWorker.read)
        stacks = ray.method(concurrency_group="io")(RemoteWorker.stacks)
        silent_s = ray.method(concurrency_group="io")(RemoteWorker.silent_s)
        status = ray.method(concurrency_group="io")(RemoteWorker.status)
        release = ray.method(concurrency_group="io")(RemoteWorker.release)
        peak_memory = ray.method(concurrency_group="io")(RemoteWorker.peak_memory)
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


def how_it_died(error: Exception) -> str:
    """Ray's report on a death, without its list of common causes."""
    text = " ".join(str(error).split("Some common causes")[0].split())
    for start in ("The actor is dead because", "The actor died because"):
        text = text.split(start)[-1].strip()
    return text[-LONGEST:]
