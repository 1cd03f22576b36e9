"""What went wrong on which worker, and which of several failures is the cause."""

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
"""Words of exceptions that a rank raises because another one is gone."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """What a worker answers in place of a result. Plain text, but for an error that the user can act on."""

    what: str
    """The call, `role.method`."""
    worker: str
    """Rank, host and process id, in words."""
    when: float
    """Seconds since the epoch."""
    message: str
    traceback: str = ""
    error: Exception | None = None
    is_death: bool = False
    is_consequence: bool = False
    """Whether it says that another worker is gone."""

    @staticmethod
    def of(error: Exception, what: str, worker: str) -> WorkerFailure:
        """An exception that was raised on this worker."""
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
        """A worker's process is gone."""
        return WorkerFailure(what=what, worker=worker, when=time.time(), message=how, is_death=True)

    def exception(self) -> Exception:
        """What the driver raises, with the worker's traceback as its cause."""
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
    """The failure that explains the others: a dead worker, else the earliest that is no broken collective."""
    return min(failures, key=lambda f: (f.is_consequence, not f.is_death, f.when))


def _is_for_the_user(error: Exception) -> bool:
    """Whether the command line has words of its own for it: no memory, no disk, and our own errors."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return isinstance(error, UniRLError | MemoryError | torch.OutOfMemoryError)


def _says_that_another_is_gone(error: Exception) -> bool:
    words = f"{type(error).__name__} {error}"
    return isinstance(error, dist.DistError) or any(word in words for word in BROKEN)


@dataclass(frozen=True)
class ThreadStacks:
    """The threads of one process."""

    text: str
    """Every thread's stack, innermost call last."""
    where: str
    """The innermost call of the thread that works, on one line."""


def stacks_of(thread: int | None) -> ThreadStacks:
    """The stacks of this process; `thread` is the ident of the one that works, None when none does."""
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
    """A new folder for the stacks of one stall, in `stack_dir` or else among the temporary files."""
    if stack_dir is None:
        return Path(tempfile.mkdtemp(prefix="unirl-stacks-"))
    folder = stack_dir / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def stall(what: str, seconds: float, places: dict[str, str], folder: Path) -> StallError:
    """The error of a wait for `what` that took too long.

    Args:
        places: of each worker, the call in which it stands.
    """
    lines = "".join(f"\n  {worker}: {where}" for worker, where in places.items())
    return StallError(
        f"{what} gave no result within {seconds:g} s. Raise stall_timeout_s if it is only slow. "
        f"The stacks of all workers are in {folder}; they stand in:{lines}"
    )


@contextmanager
def watchdog(what: str, seconds: float, stack_dir: Path | None) -> Iterator[None]:
    """End the process with exit status 8, its stacks written, when the block takes longer than `seconds`.

    For work in the driver's own thread, which nobody else can interrupt.
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
