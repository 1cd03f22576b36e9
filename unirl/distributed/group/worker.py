"""One worker: the roles of one rank, and the rows that they produced."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller

import torch

from unirl.config.errors import InvalidValueError, UnsupportedEnvironmentError
from unirl.distributed.group.dispatch import Call, remote_methods
from unirl.distributed.group.failures import ThreadStacks, WorkerFailure, stacks_of
from unirl.distributed.group.handle import Remote
from unirl.distributed.group.rank import RankInfo, running_as
from unirl.distributed.group.rendezvous import Address, Rendezvous, host_store, leave_process_group
from unirl.distributed.tensor.row_store import RowStore, RowTransport
from unirl.distributed.tensor.transports import (
    CollectiveTransport,
    Move,
    ObjectStoreCarrier,
    RayTransport,
    RowCarrier,
    RowConnection,
)
from unirl.tracking.timing import peak_memory
from unirl.types.device import CPU, DeviceKind, accelerator, device_kind, select, unusable_gpu
from unirl.types.progress import Heartbeat, report_imports, reporting_to
from unirl.types.rows import StoredRows

PARENT_CHECK_S = 0.5


class Worker:
    """Hosts the roles of one rank, in the driver's own process or in an actor of Ray."""

    def __init__(self, name: str, device: torch.device, transport: RowTransport) -> None:
        self.name = name
        self.store = RowStore(name, transport, device)
        self.roles: dict[str, object] = {}
        self.heartbeat = Heartbeat()
        self.rank = RankInfo(device=device)

    def place(self, remote: Remote) -> type:
        """Build a role beside its siblings and return its class."""
        if remote.name in self.roles:
            raise InvalidValueError(f"role {remote.name!r} is placed twice on {self.name}")
        with running_as(self.rank):
            self.roles[remote.name] = remote.build(self.roles)
        return type(self.roles[remote.name])

    def call(self, role: str, method: str, call: Call, step: int) -> object:
        """Call a method of a role. RemoteRows among the arguments become tensors, and heavy results RemoteRows."""
        self.store.step = step
        mark = remote_methods(type(self.roles[role])).get(method)
        args, kwargs = self.store.fetch(call, mark.unread if mark else ())
        with running_as(self.rank):
            result = methodcaller(method, *args, **kwargs)(self.roles[role])
        return self.store.stash(result)

    def invoke(self, role: str, method: str, *args: object) -> object:
        """Call a method of a role without converting arguments and result; for calls between workers."""
        with running_as(self.rank):
            return methodcaller(method, *args)(self.roles[role])

    def release(self, step: int) -> None:
        """Free the stored rows of a step."""
        self.store.release(step)

    def clear(self) -> None:
        """End all roles and free all stored rows. The process stays."""
        self.roles.clear()
        self.store.values.clear()
        self.rank = RankInfo(device=self.rank.device)
        gc.collect()
        self.rank.free_unused()


@dataclass(frozen=True)
class ProcessInfo:
    """A worker's location, host and process id, which are its text in messages."""

    place: str
    host: str = "unknown"
    pid: int = 0

    def __str__(self) -> str:
        if self.pid == 0:
            return f"the worker on {self.place} (which never started)"
        return f"the worker on {self.place} (host {self.host}, pid {self.pid})"


class RemoteWorker(Worker):
    """A worker in its own process. The driver calls `attempt`, which returns a WorkerFailure instead of raising."""

    def __init__(
        self,
        name: str,
        place: str,
        host: str,
        has_device: bool,
        deadline_s: float,
        connection: RowConnection | None = None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            place: the worker's location in error messages.
            host: the address of this machine for other workers.
            deadline_s: seconds that another worker may take to send rows.
            connection: the service that carries rows. None: the object store of Ray does.
            device: its device. None: the first accelerator, which is the only one that Ray shows.
        """
        if device is None:
            device = accelerator() if has_device else CPU
        why = unusable_gpu() if has_device else None
        if why is not None:
            raise UnsupportedEnvironmentError(f"{place} on {host}: {why}")
        self.carrier: RowCarrier = ObjectStoreCarrier()
        if connection is not None:
            self.carrier = connection.carrier(name, host, deadline_s)
        self.by_request = RayTransport(deadline_s, self.carrier)
        super().__init__(name, device, self.by_request)
        select(device)
        self.place_name = place
        self.host = host
        self.busy: int | None = None
        report_imports(outside=self.heartbeat)

    def attempt(self, what: str, method: str, *args: object) -> object:
        """The result of a method of this worker, or a WorkerFailure if it raised.

        Args:
            what: the name of the call in error messages.
        """
        self.busy = threading.get_ident()
        self.heartbeat.begin(f"call of {what}")
        try:
            with reporting_to(self.heartbeat):
                return methodcaller(method, *args)(self)
        except (Exception, SystemExit) as error:  # whatever a role raises is the driver's to judge: it knows all ranks
            return WorkerFailure.of(error, what, str(self.about()))
        finally:
            self.busy = None
            self.heartbeat.beat(f"end of {what}")

    def about(self) -> ProcessInfo:
        """Location, host and process id of this worker."""
        return ProcessInfo(self.place_name, self.host, os.getpid())

    def device_kind(self) -> DeviceKind:
        """The kind of this worker's device."""
        return device_kind(self.rank.device)

    def preload(self, libraries: Sequence[str]) -> None:
        """Import the libraries that roles will need, while other workers start."""
        for library in libraries:
            importlib.import_module(library)

    def visible(self) -> str:
        """The GPU that Ray gave this process, for a second process on the same GPU."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def host_store(self) -> Address:
        """Open a store in which workers find each other."""
        return host_store(self.host)

    def enter(self, meeting: Rendezvous, ranks: Mapping[str, int]) -> None:
        """Join a group of several workers as the rank that `ranks` has for this one. Returns when all have joined."""
        rank, size, device = ranks[self.name], len(ranks), self.rank.device
        joined = meeting.join_default_group(rank, device)
        self.rank = RankInfo(rank=rank, world_size=size, dp_rank=rank, dp_size=size, device=device, group=joined)

    def join_rows(self, meeting: Rendezvous, ranks: Mapping[str, int]) -> None:
        """Exchange rows over a process group from now on. Returns when all workers in `ranks` have joined."""
        group = meeting.new_group(ranks[self.name], self.rank.device)
        self.store.transport = CollectiveTransport(group, ranks, self.rank.device, meeting.timeout_s)

    def exchange(self, moves: Sequence[Move]) -> None:
        """Send and receive the rows that the next call reads."""
        transport = self.store.transport
        assert isinstance(transport, CollectiveTransport), "join_rows comes first"
        transport.exchange(self.store, moves)

    def clear(self) -> None:
        """End all roles, free all stored rows and leave all groups. The process stays."""
        self.roles.clear()
        self.store.transport = self.by_request
        leave_process_group()
        super().clear()

    def read(self, pieces: Sequence[StoredRows]) -> object:
        """Rows of this worker, packed for the carrier of another worker."""
        return self.carrier.send(self.store.read(pieces))

    def peak_memory(self) -> dict[str, float]:
        """The metrics `mem/*` of this process."""
        return peak_memory()

    def stacks(self) -> ThreadStacks:
        """The stacks of the threads of this process."""
        return replace(stacks_of(self.busy, self.heartbeat), process=self.place_name.replace(" ", "-"))

    def status(self) -> str:
        """What this process counts, as text."""
        return self.heartbeat.status()

    def silent_s(self) -> float:
        """Seconds without progress."""
        return self.heartbeat.silent_s

    def live(self) -> None:
        """Block forever. The pending call fails when the process dies, which is how the driver notices."""
        threading.Event().wait()


def end_with_parent() -> None:
    """Start a thread that kills this process when its parent process is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
