"""Failures of workers: which of several is the cause, and the stacks of calls that do not return."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from unirl.config.errors import (
    LostWorkerError,
    PluginError,
    RendezvousError,
    StallError,
    UniRLError,
    WorkerError,
    report,
)
from unirl.config.plugins import explained
from unirl.types.progress import Heartbeat, heartbeat, reporting_to

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "ActorDiedError", "Broken pipe")
"""Words in the exceptions that a rank raises because another rank is gone."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The answer of a worker whose call failed. It holds text, and the exception itself if the user can act on it."""

    what: str
    """The call, `role.method`."""
    worker: str
    """Rank, host and process id, as text for messages."""
    message: str
    traceback: str = ""
    error: Exception | None = None
    when: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    is_death: bool = False
    """True when the worker's process is gone. The message then says how it died."""
    is_consequence: bool = False
    """True when the exception only says that another worker is gone."""

    @staticmethod
    def of(error: Exception | SystemExit, what: str, worker: str) -> WorkerFailure:
        """The failure for an exception that was raised on this worker."""
        if not _is_for_the_user(error) and (why := explained(error)) is not None:
            return replace(WorkerFailure.of(PluginError(why), what, worker), traceback=_text_of(error))
        return WorkerFailure(
            what=what,
            worker=worker,
            message=f"{type(error).__name__}: {error}",
            traceback=_text_of(error),
            error=error if isinstance(error, Exception) and _is_for_the_user(error) else None,
            is_consequence=_says_that_another_is_gone(error),
        )

    def exception(self) -> Exception:
        """The exception that the driver raises, with the worker's traceback as its cause."""
        if self.is_death:
            return LostWorkerError(f"{self.worker} died while {self.what} ran: {self.message}")
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


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _is_for_the_user(error: BaseException) -> bool:
    """True for errors with a message of their own on the command line: our errors, full memory, full disk."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return isinstance(error, UniRLError | MemoryError | torch.OutOfMemoryError)


def _says_that_another_is_gone(error: BaseException) -> bool:
    if isinstance(error, RendezvousError):
        return error.is_consequence
    words = f"{type(error).__name__} {error}"
    return isinstance(error, dist.DistError) or any(word in words for word in BROKEN)


@dataclass(frozen=True)
class ThreadStacks:
    """The stacks of all threads of one process."""

    where: str
    """The innermost call of the working thread, on one line."""
    text: str = ""
    """The stack of every thread, innermost call last."""
    process: str = "driver"
    """The name of the file for `text`."""
    heartbeat: str = ""
    """The last progress of the process, on one line."""


def stacks_of(thread: int | None, heartbeat: Heartbeat) -> ThreadStacks:
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
    return ThreadStacks(where, f"pid {os.getpid()}\n\n" + "\n".join(parts), heartbeat=str(heartbeat))


def stall(
    what: str, seconds: float, stacks: Mapping[str, ThreadStacks], stack_dir: Path | None, stuck: Sequence[str] = ()
) -> StallError:
    """The error for a call `what` that makes no progress. Writes the stacks of the workers to a folder.

    Args:
        seconds: the time without progress that is allowed.
        stuck: the ranks of the call that make none, as text.
        stack_dir: where the folder is created. None: the temporary directory.
    """
    if stack_dir is None:
        folder = Path(tempfile.mkdtemp(prefix="unirl-stacks-"))
    else:
        folder = stack_dir / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
    for each in stacks.values():
        if each.text:
            (folder / f"{each.process}.txt").write_text(each.text, encoding="utf-8")
    lines = "".join(
        f"\n  {worker}: {each.where}" + (f"; {each.heartbeat}" if each.heartbeat else "")
        for worker, each in stacks.items()
    )
    ranks = f" on {', '.join(stuck)}" if stuck else ""
    return StallError(
        f"{what} made no progress for {seconds:g} s{ranks}. Raise stall_timeout_s if it is only slow. "
        f"The stacks of all workers are in {folder}. The innermost call of each worker:{lines}"
    )


@contextmanager
def watchdog(what: str, seconds: float, stack_dir: Path | None) -> Iterator[None]:
    """Write the stacks and end the process with exit status 8 when the block makes no progress for `seconds`.

    This watches the driver's own thread, which no other thread can interrupt.
    """
    working = threading.get_ident()
    beat = heartbeat() or Heartbeat()
    beat.begin(f"beginning of {what}")
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(max(seconds - beat.silent_s, 0.01)):
            if beat.silent_s >= seconds:
                end()

    def end() -> None:
        stacks = stacks_of(working, beat)
        error = stall(what, seconds, {"driver": stacks}, stack_dir)
        print(f"{stacks.text}\n{report(error)}", file=sys.stderr, flush=True)
        os._exit(StallError.exit_status)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        with reporting_to(beat):
            yield
    finally:
        is_over.set()
