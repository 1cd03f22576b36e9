"""The `torchrun` runtime: the workers are the processes that torchrun started, and the driver is in that of rank 0."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import unirl
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.distributed.group.failures import ThreadStacks, WorkerFailure, first_cause, stall
from unirl.distributed.group.process_pool import ProcessPool, WorkerGroup, WorkerLocation
from unirl.distributed.group.rendezvous import CONNECT_S
from unirl.distributed.group.torchrun import LOST, WAY, DriverDoor, TorchrunRank, packed, torchrun_rank, unpacked
from unirl.distributed.group.torchrun_worker import END, serve, worker_name
from unirl.distributed.group.worker import ProcessInfo

ANSWER_S = 5.0
"""Seconds that a worker has to answer a question."""
GRACE_S = 1.0
"""Seconds that the other ranks have to report their failures after the first one."""
CAUSE_S = 3.0
"""The same when the first failure only says that another rank is gone."""
MIN_WAIT_S = 0.05


class RankLink:
    """The worker of one rank, as the driver sees it: a connection for calls, and one for questions meanwhile."""

    def __init__(self, rank: int, calls: Connection, questions: Connection, about: tuple[str, int]) -> None:
        self.location = WorkerLocation("device", rank)
        self.name = worker_name(rank)
        self.process_info = ProcessInfo(str(self.location), *about)
        self.calls = calls
        self.questions = questions
        self.pending: deque[tuple[str, Future[object]]] = deque()
        """The calls that have not returned, in order: their names, and their results."""
        self.sending = threading.Lock()
        self.asking = threading.Lock()
        self.is_gone = False
        self.is_ending = False
        threading.Thread(target=self._receive, name=f"results of {self.location}", daemon=True).start()

    def __str__(self) -> str:
        return str(self.process_info)

    def ask(self, what: str, method: str, *args: object) -> Future[object]:
        """Start a method of the worker. A worker that is gone answers with a WorkerFailure."""
        result: Future[object] = Future()
        message = packed((what, method, args))
        with self.sending:
            if not self.is_gone:
                self.pending.append((what, result))
                with suppress(OSError):  # the worker is gone, as the thread that receives will notice
                    self.calls.send_bytes(message)
                return result
        result.set_result(self._death(what))
        return result

    def question(self, method: str, *args: object) -> object:
        """The answer to a question, such as `silent_s`, also during a call. None if there is none in ANSWER_S."""
        with self.asking, suppress(OSError, EOFError):
            self.questions.send_bytes(packed((method, args)))
            if self.questions.poll(ANSWER_S):
                answer = unpacked(self.questions.recv_bytes())
                return None if isinstance(answer, WorkerFailure) else answer
            self.questions.close()  # a late answer would be taken for that of the next question
        return None

    def _receive(self) -> None:
        while True:
            try:
                message = self.calls.recv_bytes()
            except (EOFError, OSError):
                break
            _, result = self.pending.popleft()
            result.set_result(unpacked(message))
        with self.sending:
            self.is_gone = True
            if not self.is_ending:
                LOST.append(f"rank {self.location.index}, {self}")
        while self.pending:
            what, result = self.pending.popleft()
            result.set_result(self._death(what))

    def _death(self, what: str) -> WorkerFailure:
        text = "its process has ended, as torchrun reports with its exit status"
        return WorkerFailure(what=what, worker=f"rank {self.location.index}, {self}", message=text, is_death=True)

    def end(self) -> None:
        """Let the worker end after the calls that it has."""
        self.is_ending = True
        for connection in (self.calls, self.questions):
            with suppress(OSError):
                connection.send_bytes(END)


class TorchrunPool(ProcessPool):
    """The ranks of a torchrun, one device each, as one group. Rows move between ranks over a process group."""

    def __init__(self, num_devices: int, num_updates: int = 1, deadline_s: float = 1800.0) -> None:
        own = check_world(num_devices)
        super().__init__(num_devices, num_updates, deadline_s, "collective")
        self.awaited: RankLink | None = None
        self.door = DriverDoor(own)
        threading.Thread(
            target=serve, args=(own, self.door.address, False), name="worker of rank 0", daemon=True
        ).start()
        self.links = self._connect(own)

    def _connect(self, own: TorchrunRank) -> list[RankLink]:
        """Greet the worker of every rank, which then opens its second connection."""
        deadline = time.monotonic() + CONNECT_S
        greeted = []
        for rank in range(own.world_size):
            calls, about = self.door.wait_for(rank, "calls", deadline)
            root = str(Path(unirl.__file__).resolve().parents[1])
            calls.send_bytes(packed(([root, *filter(None, sys.path)], self.deadline_s)))
            greeted.append((calls, about))
        return [
            RankLink(rank, calls, self.door.wait_for(rank, "questions", deadline)[0], about)
            for rank, (calls, about) in enumerate(greeted)
        ]

    def worker(self, location: WorkerLocation) -> RankLink:
        if location.kind != "device" or location.process:
            raise IncompatibleError(
                f"runtime=torchrun has one process for each device, and {location} is not one of them. Set runtime=ray"
            )
        return self.links[location.index]

    def all_workers(self) -> Sequence[RankLink]:
        return self.links

    def group_on(self, device_set: DeviceSet) -> WorkerGroup:
        return WorkerGroup(self, device_set)

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        with self.in_phase(phase):
            yield

    def status(self) -> str:
        awaited = self.awaited
        answer = None if awaited is None else awaited.question("status")
        return answer if isinstance(answer, str) else super().status()

    def gather(self, what: str, calls: Mapping[Future[object], RankLink], deadline_s: float) -> list[Any]:
        """The results of calls, in order. Raises the first cause when a call fails or a rank ends.

        The deadline is for the time without progress of each rank that has not returned.
        """
        what += f" (phase {self.phase})" if self.phase else ""
        begin = time.monotonic()
        end = begin + deadline_s
        failures: list[WorkerFailure] = []
        seen: set[Future[object]] = set()
        self.awaited = next(iter(calls.values()), None)
        self.heartbeat.begin(what)
        while len(seen) < len(calls):
            waiting = [call for call in calls if call not in seen]
            done, _ = wait(waiting, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            for call in done:
                seen.add(call)
                outcome = call.result()
                if isinstance(outcome, WorkerFailure):
                    failures.append(outcome)
                    end = min(end, time.monotonic() + (CAUSE_S if outcome.is_consequence else GRACE_S))
            if done:
                continue
            if failures:
                break
            silent = {calls[call]: self._silent_s(calls[call], time.monotonic() - begin) for call in waiting}
            stuck = [f"rank {link.location.index}, {link}" for link, seconds in silent.items() if seconds >= deadline_s]
            if stuck:
                raise stall(what, deadline_s, self._stacks(), self.stack_dir, stuck)
            end = time.monotonic() + max(deadline_s - max(silent.values()), MIN_WAIT_S)
        self.awaited = None
        if failures:
            raise first_cause(failures).exception()
        return [call.result() for call in calls]

    def _silent_s(self, link: RankLink, asked_s: float) -> float:
        """Seconds without progress of a rank: all since the call if it does not answer."""
        answer = link.question("silent_s")
        return min(answer, asked_s) if isinstance(answer, float) else asked_s

    def _stacks(self) -> dict[str, ThreadStacks]:
        asked = {str(link): link.question("stacks") for link in self.links}
        late = ThreadStacks(f"did not answer within {ANSWER_S:g} s")
        return {name: stacks if isinstance(stacks, ThreadStacks) else late for name, stacks in asked.items()}

    def release(self, step: int) -> None:
        for link in self.links:
            link.question("release", step)

    def memory(self) -> dict[str, float]:
        peaks_by_name: dict[str, float] = {}
        for link in self.links:
            peaks = link.question("peak_memory")
            for name, gib in (peaks if isinstance(peaks, dict) else {}).items():
                peaks_by_name[name] = max(gib, peaks_by_name.get(name, 0.0))
        return peaks_by_name

    def clear(self) -> None:
        self.groups.clear()
        self.row_workers = set()
        self.ask(self.links, "clear", "clear")

    def close(self) -> None:
        """Let all ranks end. torchrun waits for them."""
        self.groups.clear()
        for link in self.links:
            link.end()
        self.door.close()
        self.join_threads(ANSWER_S)


def check_world(num_devices: int) -> TorchrunRank:
    """The rank of this process, if torchrun started as many as the recipe has devices. Raises ConfigError (2004)."""
    own = torchrun_rank()
    if own is None:
        raise InvalidValueError(f"runtime=torchrun: this process was not started by torchrun. {WAY}")
    if own.world_size != num_devices:
        raise InvalidValueError(
            f"num_devices={num_devices}, and torchrun started WORLD_SIZE={own.world_size} processes, one for each "
            f"device. Leave num_devices out, or start {num_devices} processes"
        )
    return own
