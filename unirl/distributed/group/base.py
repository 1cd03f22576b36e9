"""The contract of a pool of devices, which both runtimes implement, and the count of the driver's traffic."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pickle import PickleBuffer
from typing import Generic, TypeVar

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import InvalidValueError
from unirl.distributed.group.handle import Group
from unirl.distributed.group.rendezvous import CONNECT_S
from unirl.tracking.timing import Spans
from unirl.types.device import DeviceKind
from unirl.types.progress import Heartbeat

WorkerGroupT = TypeVar("WorkerGroupT", bound=Group)


class Doing(threading.local):
    """The phase and the step of one thread of the driver."""

    phase = ""
    step = 0


class Pool(ABC, Generic[WorkerGroupT]):
    """Devices and the groups of workers on them.

    Args:
        num_updates: U of the row layout (`dispatch.rank_rows`), which every scattered call uses.
        deadline_s: seconds that a call may take without progress. After that it raises StallError (8001).
    """

    def __init__(self, num_devices: int, num_updates: int, deadline_s: float) -> None:
        if num_devices < 1:
            raise InvalidValueError(f"num_devices must be >= 1, got {num_devices}")
        self.num_devices = num_devices
        self.num_updates = num_updates
        self.deadline_s = deadline_s
        self.stack_dir: Path | None = None
        """The folder for the stack dumps of a stall. None: a temporary folder."""
        self.connect_s = CONNECT_S
        """Seconds that ranks may take to find each other and connect."""
        self.check_device: Callable[[DeviceSet, DeviceKind], None] | None = None
        """Refuses the device with the least memory of a device set, once its workers have started."""
        self.allow_mixed_devices = False
        """True: the ranks of a group may have devices of different kinds."""
        self.traffic = 0
        """Bytes between the driver and its workers so far. Heavy rows should not pass the driver."""
        self.heartbeat = Heartbeat("start")
        """What the driver's own thread has done, if it reports to this."""
        self.doing = Doing()
        self.phases: dict[int, str] = {}
        """The phase of each thread of the driver that is in one, by the identifier of the thread."""
        self.threads: list[threading.Thread] = []
        self.groups: dict[DeviceSet, WorkerGroupT] = {}
        self.spans: Spans | None = None
        """Records the calls of roles in groups that are made from now on."""

    @property
    def phase(self) -> str:
        """The phase that this thread of the driver is in. Empty between phases."""
        return self.doing.phase

    @property
    def step(self) -> int:
        """The step to which rows belong that workers store in calls of this thread."""
        return self.doing.step

    @step.setter
    def step(self, step: int) -> None:
        self.doing.step = step

    def group(self, device_set: DeviceSet) -> WorkerGroupT:
        """The group of workers on a device set. Equal device sets give the same group.

        Raises:
            ConfigError: 2004 when the device set is empty or names devices that the pool does not have, 2020 when the
                runtime cannot place a group on it.
        """
        if not device_set.indices or (
            device_set.kind == "device" and not set(device_set.indices) <= set(range(self.num_devices))
        ):
            raise InvalidValueError(
                f"a placement on {device_set.words} is outside the devices that num_devices={self.num_devices} gives "
                f"(0 to {self.num_devices - 1}). Raise num_devices, or name other devices"
            )
        if device_set not in self.groups:
            self.groups[device_set] = self.new_group(device_set)
            self.groups[device_set].spans = self.spans
        return self.groups[device_set]

    @abstractmethod
    def new_group(self, device_set: DeviceSet) -> WorkerGroupT:
        """A new group on a device set of this pool."""

    @abstractmethod
    def watch(self, phase: str) -> AbstractContextManager[None]:
        """Name the phase that the driver is in, for error messages, and detect a phase that hangs."""

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Name the phase of the block, in which this thread is."""
        before = self.doing.phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, phase: str) -> None:
        self.doing.phase = phase
        if phase:
            self.phases[threading.get_ident()] = phase
        else:
            self.phases.pop(threading.get_ident(), None)

    def status(self) -> str:
        """What the call that runs has done, as text for the console."""
        return self.heartbeat.status()

    def start_thread(self, name: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
        """Run `work` beside this thread of the driver. `close` waits for it, once the workers that it calls have ended.

        The thread does not keep the process alive.
        """
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self.threads = [*(each for each in self.threads if each.is_alive()), thread]
        thread.start()

    def join_threads(self, seconds: float | None = None) -> None:
        """Wait for the threads that were started, for so many seconds each; None = until they end."""
        for thread in self.threads:
            thread.join(seconds)

    def state(self) -> dict[str, float]:
        """The state of the run now (`unirl.tracking.metrics.STATE`). Any thread may call this."""
        state = {"workers": float(self.num_workers()), "silent_s": self.heartbeat.silent_s}
        return state | {f"phase/{phase}": 1.0 for phase in {*self.phases.values()}}

    def num_workers(self) -> int:
        """The number of workers that have started."""
        return len(self.groups)

    @abstractmethod
    def release(self, step: int) -> None:
        """Free the stored rows of a step on every worker."""

    def memory(self) -> dict[str, float]:
        """The metrics `mem/*` in GiB: the maximum over workers outside the driver's process, since the last call."""
        return {}

    @abstractmethod
    def clear(self) -> None:
        """End all roles and groups and free all stored rows. The worker processes stay."""

    @abstractmethod
    def close(self) -> None:
        """End all workers at once, even during a call. A second call does nothing."""


def num_bytes(value: object) -> int:
    """The size of a value as Ray serialises it: with its own pickler, and the whole storage of every tensor.

    A view of a heavy tensor therefore counts with the storage that it would carry along. Counting a step of 768 samples
    on 8 ranks (sampling, rewards, training) takes 13 ms and gives 0.31 MB.
    """
    from ray import cloudpickle

    buffers: list[PickleBuffer] = []
    stream = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)
