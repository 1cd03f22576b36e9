"""One worker: the roles of one rank, and the rows that they produced."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from unirl.config.errors import InvalidValueError
from unirl.distributed.group.failures import ThreadStacks, WorkerFailure, stacks_of
from unirl.distributed.group.rank import (
    RankInfo,
    host_store,
    join_process_group,
    leave_process_group,
    new_process_group,
    open_store,
    running_as,
)
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.row_store import RowPayload, RowStore, RowTransport
from unirl.distributed.tensor.transports import CollectiveTransport, Move, RayTransport
from unirl.tracking.tracker import peak_memory
from unirl.types.rows import StoredRows

PARENT_CHECK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """The rank of a worker in its group, and the address of the store where the ranks meet."""

    group: str
    rank: int = 0
    world_size: int = 1
    host: str = ""
    port: int = 0
    timeout_s: float = 1800.0


class Worker:
    """Hosts the roles of one rank, in the driver's own process or in an actor of Ray."""

    def __init__(self, name: str, device: torch.device, transport: RowTransport) -> None:
        self.name = name
        self.store = RowStore(name, transport, device)
        self.roles: dict[str, Any] = {}
        self.rank = RankInfo(device=device)

    def enter(self, assignment: RankAssignment) -> None:
        """Join a group as one of its ranks. Returns when all ranks have joined."""
        group = None
        if assignment.world_size > 1:
            where = (
                assignment.host,
                assignment.port,
                assignment.rank,
                assignment.world_size,
                self.rank.device,
                assignment.timeout_s,
            )
            group = join_process_group(assignment.group, *where)
        self.rank = RankInfo(
            rank=assignment.rank,
            world_size=assignment.world_size,
            dp_rank=assignment.rank,
            dp_size=assignment.world_size,
            device=self.rank.device,
            group=group,
        )

    def place(self, remote: Remote) -> type:
        """Build a role beside its siblings and return its class."""
        if remote.name in self.roles:
            raise InvalidValueError(f"role {remote.name!r} is placed twice on {self.name}")
        with running_as(self.rank):
            self.roles[remote.name] = remote.build(self.roles)
        return type(self.roles[remote.name])

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> Any:
        """Call a method of a role. RemoteRows among the arguments become tensors, and heavy results RemoteRows."""
        self.store.begin(step)
        args, kwargs = self.store.fetch((args, kwargs))
        with running_as(self.rank):
            result = methodcaller(method, *args, **kwargs)(self.roles[role])
        return self.store.stash(result)

    def invoke(self, role: str, method: str, *args: Any) -> Any:
        """Call a method of a role without converting arguments and result; for calls between workers."""
        with running_as(self.rank):
            return methodcaller(method, *args)(self.roles[role])

    def release(self, step: int) -> None:
        """Free the stored rows of a step."""
        self.store.release(step)

    def clear(self) -> None:
        """End all roles, free all stored rows and leave the group. The process stays."""
        self.roles.clear()
        self.store.clear()
        if self.rank.group is not None:
            leave_process_group()
        self.rank = RankInfo(device=self.rank.device)
        gc.collect()
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class ProcessInfo:
    """Host and process id of a worker."""

    host: str
    pid: int


class RemoteWorker(Worker):
    """A worker in its own process. The driver calls `attempt`, which returns a WorkerFailure instead of raising."""

    def __init__(self, name: str, place: str, host: str, has_device: bool, deadline_s: float) -> None:
        """
        Args:
            place: the worker's location in error messages.
            host: the address of this machine for other workers.
            deadline_s: seconds that another worker may take to send rows.
        """
        device = torch.device("cuda", 0) if has_device and torch.cuda.is_available() else torch.device("cpu")
        self.object_store = RayTransport(deadline_s)
        super().__init__(name, device, self.object_store)
        self.rows: CollectiveTransport | None = None
        self.rows_store: TCPStore | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.place_name = place
        self.host = host
        self.busy: int | None = None

    def attempt(self, what: str, method: str, *args: Any) -> Any:
        """The result of a method of this worker, or a WorkerFailure if it raised.

        Args:
            what: the name of the call in error messages.
        """
        self.busy = threading.get_ident()
        try:
            return methodcaller(method, *args)(self)
        except Exception as error:  # whatever a role raises is the driver's to judge: it knows the other ranks
            return WorkerFailure.of(error, what, self._me())
        finally:
            self.busy = None

    def about(self) -> ProcessInfo:
        """Host and process id of this worker."""
        return ProcessInfo(self.host, os.getpid())

    def preload(self, libraries: Sequence[str]) -> None:
        """Import the libraries that roles will need, while other workers start."""
        for library in libraries:
            importlib.import_module(library)

    def visible(self) -> str:
        """The GPU that Ray gave this process, for a second process on the same GPU."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def host_store(self) -> tuple[str, int]:
        """Open the store in which the ranks of a group find each other."""
        return host_store(self.host)

    def host_rows(self) -> tuple[str, int]:
        """Open the store in which the workers that exchange rows over a process group find each other."""
        self.rows_store = open_store(self.host)
        return self.host, self.rows_store.port

    def join_rows(self, host: str, port: int, ranks: Mapping[str, int], timeout_s: float) -> None:
        """Exchange rows over a process group from now on. Returns when all workers in `ranks` have joined."""
        store = PrefixStore("rows", TCPStore(host, port, is_master=False, wait_for_workers=False))
        device = self.rank.device
        group = new_process_group(store, ranks[self.name], len(ranks), device, timeout_s)
        self.rows = CollectiveTransport(group, ranks, device, timeout_s)
        self.store.transport = self.rows

    def exchange(self, moves: Sequence[Move]) -> None:
        """Send and receive the rows that the next call reads."""
        assert self.rows is not None, "join_rows comes first"
        self.rows.exchange(self.store, moves)

    def clear(self) -> None:
        """End all roles, free all stored rows and leave all groups. The process stays."""
        super().clear()
        self.store.transport = self.object_store
        self.rows = self.rows_store = None

    def read(self, pieces: Sequence[StoredRows]) -> list[RowPayload]:
        """Rows of this worker, for another worker."""
        return self.store.read(pieces)

    def peak_memory(self) -> dict[str, float]:
        """The metrics `mem/*` of this process."""
        return peak_memory()

    def stacks(self) -> ThreadStacks:
        """The stacks of the threads of this process."""
        return stacks_of(self.busy)

    def live(self) -> None:
        """Block forever. The pending call fails when the process dies, which is how the driver notices."""
        threading.Event().wait()

    def _me(self) -> str:
        return describe(self.place_name, self.about())


def describe(place: str, about: ProcessInfo) -> str:
    """The text for a worker in messages."""
    if about.pid == 0:
        return f"the worker on {place} (which never started)"
    return f"the worker on {place} (host {about.host}, pid {about.pid})"


def end_with_parent() -> None:
    """Start a thread that kills this process when its parent process is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
