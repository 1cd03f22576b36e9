"""What went wrong on which worker, and which of several failures is the cause."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from unirl.config.errors import UniRLError, WorkerError

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
