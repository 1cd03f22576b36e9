"""Turns an exception into a message for the user and the exit status of the process."""

import errno
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unirl.config.errors import PluginError, Preempted, StoppedAtStart, UniRLError, report
from unirl.config.plugins import explained, summary, suspects

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""The errors of a folder or file that this process may not write or read as it tries to."""
OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""The text of a failed allocation on the CPU, for which torch raises a plain RuntimeError."""


@dataclass(frozen=True)
class Restart:
    """A restart of a run by itself."""

    number: int
    """The number of restarts within the window of time, with this one."""
    allowed: int
    error: str
    """The error that ended the attempt before."""
    num_devices: int
    """The devices of this attempt."""


@dataclass
class Session:
    """One command: its arguments, and the run directory once it exists."""

    argv: tuple[str, ...] = ()
    run_dir: Path | None = None
    restart: Restart | None = None
    """The last restart of the run."""
    has_started: threading.Event = field(default_factory=threading.Event)
    """Set when the run prints its banner, or ends before."""
    grace_s: float = 30.0
    """Seconds after a stop signal by which the process ends. Before a run begins there is nothing to save."""
    on_start: Callable[[], None] = lambda: None
    """Waits until nothing else prints."""

    def start(self) -> None:
        """Ends what the command prints before the banner. A second call does nothing."""
        self.has_started.set()
        self.on_start()

    @property
    def debug(self) -> bool:
        return "--debug" in self.argv


@dataclass(frozen=True)
class ExitReport:
    """The message and exit status of an exception."""

    message: str
    status: int
    is_bug: bool = False


def failure_of(error: BaseException) -> ExitReport:
    """The message about `error`, and the exit status of the process, which depends on the class of failure."""
    match error:
        case UniRLError(exit_status=75 | 130 as status):
            return ExitReport(f"unirl: {error}", status)
        case UniRLError(exit_status=status):
            return ExitReport(report(error), status)
        case StoppedAtStart():
            return ExitReport(f"unirl: {error}", Preempted.exit_status)
        case KeyboardInterrupt():
            return ExitReport("unirl: interrupted", 130)
        case _ if is_full_disk(error):
            file = error.filename if isinstance(error, OSError) else None
            where = f" while writing {file}" if file else ""
            return ExitReport(
                f"error[7003]: {no_space_of(error)}{where} ({summary(error)}). Free some space, raise the limit, or "
                "choose another folder (run.dir, --out). Published checkpoints are intact: unirl ckpt prune RUN --keep "
                "1 frees space, and resume=auto continues a run",
                7,
            )
        case OSError(errno=number, filename=str(file)) if number in UNWRITABLE:
            return ExitReport(
                f"error[7003]: {file} cannot be used: {error.strerror}. Choose a folder that this user may write to "
                "(run.dir, --out), or correct its rights",
                7,
            )
        case ModuleNotFoundError(name=str(name)) if name.split(".")[0] != "unirl":
            return ExitReport(
                f"error[3001]: the Python package '{name.split('.')[0]}' is not installed here. Install everything "
                f"with: pip install -c constraints.txt -e '.[dev]'   (this Python: {sys.executable})",
                3,
            )
    first = next(iter(str(error).splitlines()), "")
    if is_out_of_memory(error):
        return ExitReport(
            f"error[5002]: out of memory: {first or 'no more memory'}. Turn these down, in this order: "
            "stack.micro_batch_size, rollout.forward_batch_size, sampling.height and width. "
            "unirl plan RECIPE shows where the memory goes, and unirl fit RECIPE finds settings that fit",
            5,
        )
    if (why := explained(error)) is not None:
        return ExitReport(report(PluginError(why)), PluginError.exit_status)
    return ExitReport(
        f"error[1001]: {type(error).__name__}: {first}\n"
        f"  This is a bug in UniRL{suspects()}: please report it, with the output of `unirl env`.",
        1,
        is_bug=True,
    )


def is_full_disk(error: BaseException) -> bool:
    """True if a disk is full. Libraries that write tensors say so with exception types of their own."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return isinstance(error, Exception) and os.strerror(errno.ENOSPC) in str(error)


def no_space_of(error: BaseException) -> str:
    """The limit that a write reached."""
    number = error.errno if isinstance(error, OSError) else errno.ENOSPC
    return {
        errno.EDQUOT: "the disk quota of this user is used up",
        errno.EFBIG: "a file reached the largest size that this process may write (ulimit -f)",
    }.get(number or 0, "the disk is full")


def is_out_of_memory(error: BaseException) -> bool:
    """True for every way in which torch and Python say that memory ran out, on a device or on the host."""
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_device or isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
