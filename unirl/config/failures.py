"""Turns an exception into a message for the user and the exit status of the process."""

import errno
import sys
from dataclasses import dataclass
from pathlib import Path

from unirl.config.errors import UniRLError, report

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""The text of a failed allocation on the CPU, for which torch raises a plain RuntimeError."""


@dataclass
class Session:
    """One command: its arguments, and the run directory once it exists."""

    argv: tuple[str, ...] = ()
    run_dir: Path | None = None

    @property
    def debug(self) -> bool:
        return "--debug" in self.argv


@dataclass(frozen=True)
class Failure:
    """The message and exit status of an exception."""

    message: str
    status: int
    is_bug: bool = False

    def text(self, crash: Path | None = None) -> str:
        return f"{self.message}\n  The traceback is in {crash}" if crash else self.message


def failure_of(error: BaseException) -> Failure:
    """The message about `error`, and the exit status of the process, which depends on the class of failure."""
    match error:
        case UniRLError(exit_status=75 | 130 as status):
            return Failure(f"unirl: {error}", status)
        case UniRLError(exit_status=status):
            return Failure(report(error), status)
        case KeyboardInterrupt():
            return Failure("unirl: interrupted", 130)
        case OSError(errno=number) if number in NO_SPACE:
            return Failure(_disk_full(error), 7)
        case ModuleNotFoundError(name=str(name)) if name.split(".")[0] != "unirl":
            return Failure(_missing(name), 3)
    return Failure(_out_of_memory(error), 5) if _is_out_of_memory(error) else Failure(_bug(error), 1, is_bug=True)


def _disk_full(error: OSError) -> str:
    where = f" while writing {error.filename}" if error.filename else ""
    return (
        f"error[7003]: the disk is full{where} ({error.strerror}). Published checkpoints are intact. "
        "Free some space (unirl ckpt prune RUN --keep 1), then continue with resume=auto"
    )


def _missing(name: str) -> str:
    return (
        f"error[3001]: the Python package '{name.split('.')[0]}' is not installed here. "
        f"Install everything with: pip install -c constraints.txt -e '.[dev]'   (this Python: {sys.executable})"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_device or isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def _out_of_memory(error: BaseException) -> str:
    first = (str(error).splitlines() or ["no more memory"])[0]
    return (
        f"error[5002]: out of memory: {first}. Turn these down, in this order: stack.micro_batch_size, "
        "rollout.forward_batch_size, sampling.height and width. unirl plan RECIPE shows where the memory goes"
    )


def _bug(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return (
        f"error[1001]: {type(error).__name__}: {first}\n"
        "  This is a bug in UniRL: please report it, with the output of `unirl env`."
    )
