"""Opens the pool of a run, and the `local` runtime: groups of one worker in the driver's process, for debuggers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError
from unirl.config.node_groups import NodeGroups
from unirl.config.recipe import Runtime
from unirl.distributed.group.base import Pool
from unirl.distributed.group.dispatch import Call, split_call
from unirl.distributed.group.failures import stacks_of, stall, watchdog
from unirl.distributed.group.handle import Group, PendingCall, Remote
from unirl.distributed.group.ray_pool import RayPool
from unirl.distributed.group.torchrun_pool import TorchrunPool
from unirl.distributed.group.worker import Worker
from unirl.distributed.tensor.row_store import InProcessTransport, RowTransportName
from unirl.distributed.tensor.transports import RowService
from unirl.types.device import CPU, DeviceKind, accelerator, device_kind
from unirl.types.progress import Heartbeat, heartbeat, reporting_to


class LocalGroup(Group):
    """One worker in this process. Calls run inline; submitted calls run one after another, beside the driver."""

    def __init__(self, pool: LocalPool, device_set: DeviceSet) -> None:
        super().__init__(device_set.words, 1, pool.deadline_s, pool.connect_s)
        self.pool = pool
        name = f"local-{os.getpid()}-{device_set.kind}-{device_set.indices[0]}-{device_set.process}"
        self.device = local_device(device_set)
        self.worker = Worker(name, self.device, pool.transport)
        pool.transport.stores[name] = self.worker.store
        self.thread: threading.Thread | None = None
        """Runs the call that was submitted last."""
        self.busy: int | None = None
        """The identifier of the thread whose submitted call runs."""
        self.running = threading.Lock()
        """Held by the thread that runs a call. A worker runs one call at a time."""

    def device_kind(self) -> DeviceKind:
        return device_kind(self.device)

    def build(self, remote: Remote) -> type:
        return self.worker.place(remote)

    def role_here(self, role: str) -> object | None:
        return self.worker.roles.get(role)

    def run(self, role: str, method: str, call: Call) -> Any:
        parts = split_call(
            f"{role}.{method}", self.marks[role][method], call, 1, self.num_updates.get(role, self.pool.num_updates)
        )
        with self.running:
            return parts.merge([self.worker.call(role, method, part, self.pool.step) for part in parts.calls])

    def submit(self, role: str, method: str, call: Call) -> PendingCall[Any]:
        """Start a call and return at once. A call that hangs does not keep the process alive."""
        self.worker.heartbeat.begin(f"call of {role}.{method}")
        future: Future[Any] = Future()
        arguments = (future, self.thread, self.pool.step, role, method, call)
        self.thread = threading.Thread(target=self._work, args=arguments, name=self.worker.name, daemon=True)
        self.thread.start()
        return PendingCall(partial(self._result, f"{role}.{method}", future), self.deadline_s)

    def _work(
        self, future: Future[Any], previous: threading.Thread | None, step: int, role: str, method: str, call: Call
    ) -> None:
        if previous is not None:
            previous.join()
        self.pool.step = step
        self.busy = threading.get_ident()
        try:
            with reporting_to(self.worker.heartbeat):
                future.set_result(self.run(role, method, call))
        except BaseException as error:  # raised again where the caller waits for the future
            future.set_exception(error)

    def _result(self, what: str, future: Future[Any], deadline_s: float) -> Any:
        """The result of a submitted call. While the driver waits for it, its progress is the driver's."""
        worker, begin = self.worker.heartbeat, time.monotonic()
        with (heartbeat() or Heartbeat()).waiting_for(worker):
            while (silent_s := min(worker.silent_s, time.monotonic() - begin)) < deadline_s:
                with suppress(TimeoutError):
                    return future.result(deadline_s - silent_s)
                if future.done():  # the call itself raised TimeoutError
                    return future.result()
        stacks = {self.name: stacks_of(self.busy, worker)}
        raise stall(what, deadline_s, stacks, self.pool.stack_dir)


class LocalPool(Pool[LocalGroup]):
    """Devices of this process. A device set has one device; several device sets are several groups in the process."""

    def __init__(self, num_devices: int, num_updates: int, deadline_s: float) -> None:
        super().__init__(num_devices, num_updates, deadline_s)
        self.transport = InProcessTransport()

    def new_group(self, device_set: DeviceSet) -> LocalGroup:
        """The group on a device set with one device. Raises ConfigError (2020) when it has several."""
        if len(device_set.indices) > 1:
            raise IncompatibleError(
                f"a placement on {device_set.words} needs {len(device_set.indices)} workers, and runtime: local has "
                "one process, which is one worker. Set runtime=ray, or place the role on one device"
            )
        return LocalGroup(self, device_set)

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """End the process when the block makes no progress for the deadline."""
        with self.in_phase(phase), watchdog(f"phase {phase}", self.deadline_s, self.stack_dir):
            yield

    def release(self, step: int) -> None:
        for group in self.groups.values():
            group.worker.release(step)

    def clear(self) -> None:
        for group in self.groups.values():
            group.worker.clear()
        self.groups.clear()
        self.transport = InProcessTransport()

    def close(self) -> None:
        """End all roles and free all stored rows. There is no process to end; a call that runs is waited for."""
        self.join_threads()
        self.clear()


def local_device(device_set: DeviceSet) -> torch.device:
    """The accelerator of a device set, if this process has any. Indices beyond the last accelerator wrap around."""
    return CPU if device_set.kind == "cpu" else accelerator(device_set.indices[0])


def open_pool(
    runtime: Runtime,
    num_devices: int,
    devices_per_node: int | None = None,
    num_updates: int = 1,
    deadline_s: float = 1800.0,
    row_transport: RowTransportName = "object_store",
    threads: int | None = None,
    row_service: RowService | None = None,
    node_groups: NodeGroups | None = None,
) -> Pool:
    """Open the pool of a runtime. The caller closes it; until then workers of Ray stay, also without roles.

    Args:
        devices_per_node: devices on each machine. None: all devices are on one machine.
        num_updates: U of the row layout.
        deadline_s: seconds that a call may take without progress.
        row_transport: how stored rows are sent between workers of Ray.
        threads: threads of each worker of Ray. None: an equal share of the cores of its machine.
        row_service: carries the rows between workers of Ray. None: Ray's object store or a process group does.
        node_groups: the nodes of a Ray cluster whose devices the pool has. None: equal nodes.
    """
    if runtime == "local":
        return LocalPool(num_devices, num_updates, deadline_s)
    if runtime == "torchrun":
        return TorchrunPool(num_devices, num_updates, deadline_s)
    return RayPool(
        num_devices,
        devices_per_node,
        num_updates,
        deadline_s,
        row_transport=row_transport,
        threads=threads,
        row_service=row_service,
        node_groups=node_groups,
    )
