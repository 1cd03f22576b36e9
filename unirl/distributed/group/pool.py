"""Opens the pool of a run, and the `local` runtime: groups of one worker in the driver's process, for debuggers."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import torch

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError
from unirl.distributed.group.base import Pool
from unirl.distributed.group.dispatch import Dispatch, remote_methods, split_call
from unirl.distributed.group.failures import stack_folder, stacks_of, stall, watchdog
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.ray_pool import RayPool
from unirl.distributed.group.remote import Remote
from unirl.distributed.group.worker import RankAssignment, Worker
from unirl.distributed.tensor.row_store import InProcessTransport, RowTransportName


@dataclass(frozen=True)
class LocalPending:
    """A call that runs on the own thread of its group."""

    what: str
    future: Future[Any]
    group: LocalGroup

    def result(self, deadline_s: float | None = None) -> Any:
        """The result; StallError (8001) when it has not come within `deadline_s` seconds (the group's, if absent)."""
        seconds = self.group.deadline_s if deadline_s is None else deadline_s
        try:
            return self.future.result(seconds)
        except FutureTimeout as timeout:
            if self.future.done():
                raise
            stacks, folder = stacks_of(self.group.executor.ident), stack_folder(self.group.pool.stack_dir)
            (folder / "driver.txt").write_text(stacks.text, encoding="utf-8")
            raise stall(self.what, seconds, {self.group.name: stacks.where}, folder) from timeout


class SerialExecutor:
    """One daemon thread that runs calls in order. A call that hangs does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.thread: Thread | None = None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call after the calls that were submitted before it."""
        if self.thread is None:
            self.thread = Thread(target=self._work, name=self.name, daemon=True)
            self.thread.start()
        future: Future[Any] = Future()
        self.calls.put((future, call))
        return future

    @property
    def ident(self) -> int | None:
        """The identifier of the thread, or None before the first call."""
        return self.thread.ident if self.thread else None

    def close(self) -> None:
        """End the thread after the calls that were submitted."""
        self.calls.put(None)

    def _work(self) -> None:
        while (job := self.calls.get()) is not None:
            future, call = job
            try:
                future.set_result(call())
            except BaseException as error:  # raised again where the caller waits for the future
                future.set_exception(error)


class LocalGroup:
    """One worker in this process. Calls run inline; submitted calls run on the group's own thread."""

    num_ranks = 1
    workers: tuple[Any, ...] = ()
    hosts = ("127.0.0.1",)

    def __init__(self, pool: LocalPool, device_set: DeviceSet, worker: Worker) -> None:
        self.pool = pool
        self.name = device_set.words
        self.deadline_s = pool.deadline_s
        self.worker = worker
        self.marks: dict[str, dict[str, Dispatch]] = {}
        self.executor = SerialExecutor(worker.name)

    def place(self, remote: Remote) -> Handle:
        """Build a role beside its siblings and return its handle."""
        role_class = self.worker.place(remote)
        self.marks[remote.name] = remote_methods(role_class)
        return Handle(self, remote.name, role_class)

    def role_here(self, role: str) -> Any | None:
        """The object of a role, which lives in this process, or None."""
        return self.worker.roles.get(role)

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and wait."""
        parts = split_call(f"{role}.{method}", self.marks[role][method], (args, kwargs), 1, self.pool.num_updates)
        return parts.merge([self.worker.call(role, method, *call, self.pool.step) for call in parts.calls])

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalPending:
        """Start a call and return at once."""
        return LocalPending(
            f"{role}.{method}", self.executor.submit(partial(self.run, role, method, args, kwargs)), self
        )

    def close(self) -> None:
        """End all roles."""
        self.executor.close()
        self.worker.clear()


class LocalPool(Pool):
    """Devices of this process. A device set has one device; several device sets are several groups in the process."""

    def __init__(self, num_devices: int, num_updates: int, deadline_s: float) -> None:
        super().__init__(num_devices, num_updates, deadline_s)
        self.transport = InProcessTransport()
        self.groups: dict[DeviceSet, LocalGroup] = {}

    def group(self, device_set: DeviceSet) -> LocalGroup:
        """The group on a device set with one device.

        Raises:
            ConfigError: 2020 when the device set has several devices.
        """
        self.check(device_set)
        if len(device_set.indices) > 1:
            raise IncompatibleError(
                f"a placement on {device_set.words} needs {len(device_set.indices)} workers, and runtime: local has "
                "one process, which is one worker. Set runtime=ray, or place the role on one device"
            )
        if device_set not in self.groups:
            self.groups[device_set] = self._group(device_set)
        return self.groups[device_set]

    def _group(self, device_set: DeviceSet) -> LocalGroup:
        name = f"local-{os.getpid()}-{device_set.kind}-{device_set.indices[0]}-{device_set.process}"
        worker = Worker(name, local_device(device_set), self.transport)
        worker.enter(RankAssignment(group=name))
        self.transport.add(worker.store)
        return LocalGroup(self, device_set, worker)

    def watch(self, phase: str) -> AbstractContextManager[None]:
        """End the process when the block takes longer than the deadline."""
        return watchdog(f"phase {phase}", self.deadline_s, self.stack_dir)

    def release(self, step: int) -> None:
        """Free the stored rows of a step."""
        for group in self.groups.values():
            group.worker.release(step)

    def clear(self) -> None:
        """End all roles and free all stored rows."""
        for group in self.groups.values():
            group.close()
        self.groups.clear()
        self.transport = InProcessTransport()

    def close(self) -> None:
        """End all roles and free all stored rows. There is no process to end."""
        self.clear()


def local_device(device_set: DeviceSet) -> torch.device:
    """The accelerator of a device set, if this process has any. Indices beyond the last accelerator wrap around."""
    if device_set.kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_set.indices[0] % torch.cuda.device_count())


__all__ = ["Pool", "Runtime", "open_pool"]

Runtime = Literal["local", "ray"]


def open_pool(
    runtime: Runtime,
    num_devices: int,
    devices_per_node: int | None = None,
    num_updates: int = 1,
    deadline_s: float = 1800.0,
    row_transport: RowTransportName = "object_store",
) -> Pool:
    """Open the pool of a runtime. The caller closes it; until then workers of Ray stay, also without roles.

    Args:
        devices_per_node: devices on each machine. None: all devices are on one machine.
        num_updates: U of the row layout.
        deadline_s: seconds that one call may take.
        row_transport: how stored rows are sent between workers of Ray.
    """
    if runtime == "local":
        return LocalPool(num_devices, num_updates, deadline_s)
    return RayPool(num_devices, devices_per_node, num_updates, deadline_s, row_transport=row_transport)
