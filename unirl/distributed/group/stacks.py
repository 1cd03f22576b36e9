"""Where the threads of a process stand, for the moment when something hangs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unirl.config.errors import StallError, report


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
