"""Worker processes that share the slots of an environment. One that dies or hangs is killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from unirl.distributed.group.reaper import kill_on_exit
from unirl.envs.messages import (
    MOST_BYTES,
    Opening,
    Ready,
    RenderRequest,
    Request,
    ResetRequest,
    SlotsReply,
    StepRequest,
)
from unirl.envs.slots import DrawingError, Source, StepArrays
from unirl.envs.spaces import Array, Arrays, Codec, Reader, empty_rows

START_S = 300.0
"""Seconds that a process may take to import its libraries and to make its first environment."""
ENCODER = msgspec.msgpack.Encoder()
REPLIES = msgspec.msgpack.Decoder(SlotsReply)


class EnvironmentProcessError(Exception):
    """A worker died, or is late and was killed. The message says which."""


class EnvironmentWorker:
    """One process, and the slots in which it plays an episode."""

    def __init__(self, source: Source) -> None:
        self.slots: set[int] = set()
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unirl.envs.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which finishes its step
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        # A worker whose environment hangs does not notice that its pipe closed.
        reaper = kill_on_exit([self._process.pid])
        self._end = weakref.finalize(self, _end, self._process, reaper, self._pipe)
        self._send(ENCODER.encode(Opening(source, sys.path)))
        self._is_ready = False

    def send(self, request: Request) -> None:
        """Raises EnvironmentProcessError if the process is gone, or cannot make an environment."""
        if not self._is_ready:
            ready = msgspec.msgpack.decode(self._receive(time.monotonic() + START_S, START_S), type=Ready)
            if ready.reason:
                self.close()
                raise EnvironmentProcessError(ready.reason)
            self._is_ready = True
        self._send(ENCODER.encode(request))

    def reply(self, deadline: float, limit_s: float) -> SlotsReply:
        """The answer to the last request.

        Raises EnvironmentProcessError if none comes until `deadline`, which is in `limit_s` seconds.
        """
        return REPLIES.decode(self._receive(deadline, limit_s))

    def close(self) -> None:
        """Kill the process."""
        self._end()

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionError):  # `_receive` says how it died
            self._pipe.send_bytes(message)

    def _receive(self, deadline: float, limit_s: float) -> bytes:
        try:
            if self._pipe.poll(max(deadline - time.monotonic(), 0.0)):
                return self._pipe.recv_bytes(MOST_BYTES)
        except (EOFError, OSError):
            status = self._process.wait()
            self.close()
            raise EnvironmentProcessError(f"the worker process of the environment ended (status {status})") from None
        self.close()
        raise EnvironmentProcessError(
            f"the environment did not answer within {limit_s:g} s; its worker process was killed"
        )


def _end(process: subprocess.Popen[bytes], reaper: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()
    assert reaper.stdin is not None
    reaper.stdin.close()
    reaper.wait()


class WorkerPool:
    """The slots of `unirl.envs.slots.Slots` in processes: slot s belongs to process s modulo their number."""

    def __init__(
        self, source: Source, readers: Mapping[str, Reader], codec: Codec, num_workers: int, timeout_s: float
    ) -> None:
        self.readers, self.codec = readers, codec
        self._source, self._timeout_s = source, timeout_s
        self._workers: list[EnvironmentWorker | None] = [None] * num_workers
        self._lost: dict[int, str] = {}
        """Slots whose episode ended with their worker, and why. Their next step reports it."""

    def reset(
        self, slots: Sequence[int], seeds: Sequence[int], options: Sequence[Mapping[str, object]]
    ) -> tuple[Arrays, dict[int, str]]:
        """The first observations, and the reasons by row why an environment cannot start, even made anew."""
        observations = empty_rows(self.readers, len(slots))
        failures: dict[int, str] = {}

        def request(rows: Sequence[int]) -> Request:
            return ResetRequest([slots[r] for r in rows], [seeds[r] for r in rows], [dict(options[r]) for r in rows])

        def read(rows: Sequence[int], reply: SlotsReply) -> None:
            self._read_observations(observations, rows, reply)
            failures.update({rows[place]: reason for place, reason in reply.faults.items()})

        failed = self._ask(slots, range(len(slots)), request, read)
        failures.update(self._ask(slots, sorted(failed), request, read))
        for row, slot in enumerate(slots):
            self._lost.pop(slot, None)
            worker = self._workers[slot % len(self._workers)]
            if worker is not None and row not in failures:
                worker.slots.add(slot)
        return observations, failures

    def step(self, slots: Sequence[int], actions: Array) -> StepArrays:
        """One action in each slot: [B] int64, or [B, A] float32."""
        result = StepArrays.empty(self.readers, len(slots))

        def request(rows: Sequence[int]) -> Request:
            return StepRequest([slots[row] for row in rows], np.ascontiguousarray(actions[rows]).tobytes())

        def read(rows: Sequence[int], reply: SlotsReply) -> None:
            self._read_observations(result.observations, rows, reply)
            result.rewards[rows] = np.frombuffer(reply.rewards, np.float32)
            result.ends[:, rows] = np.frombuffer(reply.ends, bool).reshape(2, len(rows))
            result.success[rows] = np.frombuffer(reply.success, np.int8)
            result.faults.update({rows[place]: reason for place, reason in reply.faults.items()})

        lost = {row: self._lost.pop(slot) for row, slot in enumerate(slots) if slot in self._lost}
        rows = [row for row in range(len(slots)) if row not in lost]
        for row, reason in (lost | self._ask(slots, rows, request, read)).items():
            result.set_fault(row, reason)
            self._lost.pop(slots[row], None)
        return result

    def render(self, slots: Sequence[int]) -> Array:
        """[B, 3, H, W] uint8 images of the slots. Raises DrawingError, with the reason in one line."""
        images: dict[int, Array] = {}

        def read(rows: Sequence[int], reply: SlotsReply) -> None:
            for reason in reply.faults.values():
                raise DrawingError(reason)
            drawn = np.frombuffer(reply.images, np.uint8).reshape(reply.image_shape)
            images.update(zip(rows, drawn, strict=True))

        failed = self._ask(slots, range(len(slots)), lambda rows: RenderRequest([slots[row] for row in rows]), read)
        for row in failed:  # the next step reports the fault
            images[row] = np.zeros_like(next(iter(images.values()), np.zeros((3, 1, 1), np.uint8)))
        return np.stack([images[row] for row in range(len(slots))])

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            if worker is not None:
                worker.close()
        self._workers = [None] * len(self._workers)
        self._lost.clear()

    def _ask(
        self,
        slots: Sequence[int],
        rows: Sequence[int],
        request: Callable[[Sequence[int]], Request],
        read: Callable[[Sequence[int], SlotsReply], None],
    ) -> dict[int, str]:
        """Send each worker one request for its rows, and read the replies. Returns the reasons of failures by row."""
        shares: dict[int, list[int]] = {}
        for row in rows:
            shares.setdefault(slots[row] % len(self._workers), []).append(row)
        failed: dict[int, str] = {}
        for number in shares:  # all start at the same time
            if self._workers[number] is None:
                self._workers[number] = EnvironmentWorker(self._source)
        asked: dict[int, EnvironmentWorker] = {}
        for number, share in shares.items():
            worker = self._workers[number]
            assert worker is not None
            try:
                worker.send(request(share))
                asked[number] = worker
            except EnvironmentProcessError as failure:
                failed |= self._drop(number, share, str(failure))
        deadline = time.monotonic() + self._timeout_s
        for number, worker in asked.items():
            try:
                read(shares[number], worker.reply(deadline, self._timeout_s))
            except EnvironmentProcessError as failure:
                failed |= self._drop(number, shares[number], str(failure))
        return failed

    def _drop(self, number: int, share: Sequence[int], reason: str) -> dict[int, str]:
        """Forget a worker that failed. Its other slots report the fault at their next step."""
        worker = self._workers[number]
        assert worker is not None
        self._lost.update(dict.fromkeys(worker.slots, reason))
        self._workers[number] = None
        return dict.fromkeys(share, reason)

    def _read_observations(self, into: Arrays, rows: Sequence[int], reply: SlotsReply) -> None:
        for key, reader in self.readers.items():
            values = np.frombuffer(reply.observations[key], reader.dtype)
            into[key][rows] = values.reshape(len(rows), *reader.shape)
