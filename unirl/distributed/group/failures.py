"""Failures of workers: which of several is the cause, and the stacks of calls that do not return."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from unirl.config.errors import StallError, UniRLError, WorkerError, report

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "ActorDiedError", "Broken pipe")
"""Words in the exceptions that a rank raises because another rank is gone."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The answer of a worker whose call failed. It holds text, and the exception itself if the user can act on it."""

    what: str
    """The call, `role.method`."""
    worker: str
    """Rank, host and process id, as text for messages."""
    when: float
    """Seconds since the epoch."""
    message: str
    traceback: str = ""
    error: Exception | None = None
    is_death: bool = False
    is_consequence: bool = False
    """True when the exception only says that another worker is gone."""

    @staticmethod
    def of(error: Exception, what: str, worker: str) -> WorkerFailure:
        """The failure for an exception that was raised on this worker."""
        return WorkerFailure(
            what=what,
            worker=worker,
            when=time.time(),
            message=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
            error=error if _is_for_the_user(error) else None,
            is_consequence=_says_that_another_is_gone(error),
        )

    @staticmethod
    def death(what: str, worker: str, how: str) -> WorkerFailure:
        """The failure for a worker whose process is gone."""
        return WorkerFailure(what=what, worker=worker, when=time.time(), message=how, is_death=True)

    def exception(self) -> Exception:
        """The exception that the driver raises, with the worker's traceback as its cause."""
        if self.is_death:
            return WorkerError(f"{self.worker} died while {self.what} ran: {self.message}")
        error = self.error or WorkerError(f"{self.what} failed on {self.worker}: {self.message}")
        error.add_note(f"raised by {self.what} on {self.worker}")
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


class RemoteTraceback(Exception):
    """The traceback of a worker, shown above the driver's own."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def first_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The failure that explains the others: a dead worker, else the earliest one that is not a broken collective."""
    return min(failures, key=lambda f: (f.is_consequence, not f.is_death, f.when))


def _is_for_the_user(error: Exception) -> bool:
    """True for errors with a message of their own on the command line: our errors, full memory, full disk."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return isinstance(error, UniRLError | MemoryError | torch.OutOfMemoryError)


def _says_that_another_is_gone(error: Exception) -> bool:
    words = f"{type(error).__name__} {error}"
    return isinstance(error, dist.DistError) or any(word in words for word in BROKEN)


@dataclass(frozen=True)
class ThreadStacks:
    """The stacks of all threads of one process."""

    text: str
    """The stack of every thread, innermost call last."""
    where: str
    """The innermost call of the working thread, on one line."""


def stacks_of(thread: int | None) -> ThreadStacks:
    """The stacks of this process. `thread` is the identifier of the working thread, None when the process is idle."""
    names = {known.ident: known.name for known in threading.enumerate()}
    frames = sys._current_frames()
    parts = [
        f"thread {names.get(ident, 'of native code')} ({ident})\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    ]
    where = "idle"
    if thread in frames:
        last = traceback.extract_stack(frames[thread])[-1]
        where = f"{last.filename}:{last.lineno} in {last.name}"
    return ThreadStacks(f"pid {os.getpid()}\n\n" + "\n".join(parts), where)


def stack_folder(stack_dir: Path | None) -> Path:
    """Create a folder for the stacks of one stall, in `stack_dir` if given, else in the temporary directory."""
    if stack_dir is None:
        return Path(tempfile.mkdtemp(prefix="unirl-stacks-"))
    folder = stack_dir / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def stall(what: str, seconds: float, positions: dict[str, str], folder: Path) -> StallError:
    """The error for a call `what` that did not return in time.

    Args:
        positions: the innermost call of each worker, by worker.
    """
    lines = "".join(f"\n  {worker}: {where}" for worker, where in positions.items())
    return StallError(
        f"{what} did not return within {seconds:g} s. Raise stall_timeout_s if it is only slow. "
        f"The stacks of all workers are in {folder}. The innermost call of each worker:{lines}"
    )


@contextmanager
def watchdog(what: str, seconds: float, stack_dir: Path | None) -> Iterator[None]:
    """Write the stacks and end the process with exit status 8 when the block takes longer than `seconds`.

    This watches the driver's own thread, which no other thread can interrupt.
    """
    working = threading.get_ident()

    def end() -> None:
        stacks = stacks_of(working)
        folder = stack_folder(stack_dir)
        (folder / "driver.txt").write_text(stacks.text, encoding="utf-8")
        error = stall(what, seconds, {"driver": stacks.where}, folder)
        print(f"{stacks.text}\n{report(error)}", file=sys.stderr, flush=True)
        os._exit(StallError.exit_status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
