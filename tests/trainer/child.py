"""The command that a user types, in a process that finds everything imported."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType

import time_machine

from tests.processes import like_this


def begin(recipe: str, folder: Path, *overrides: str, own_session: bool = False) -> ForkServerProcess:
    """`unirl train` into `folder`, begun: on one thread, since several run at a time."""
    return like_this(_train, recipe, str(folder), overrides, own_session)


def said(folder: Path) -> str:
    """The last of what the runs into `folder` printed."""
    return Path(f"{folder}.log").read_text()[-5000:]


def jump_clock(pid: int, seconds: int) -> None:
    """Moves the wall clocks of Python in a process of `begin` by some seconds; monotonic clocks go on.

    Waits until a process that begins has its handler: without one, the signal would end it.
    """
    while Path(f"/proc/{pid}").exists() and not _handles(pid, signal.SIGRTMIN):
        time.sleep(0.01)
    _clock(pid).write_text(str(seconds))
    os.kill(pid, signal.SIGRTMIN)


def _handles(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal."""
    with suppress(OSError):
        [handled] = re.findall(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
        return bool(int(handled, 16) >> (number - 1) & 1)
    return False


def _clock(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f"unirl-clock-{pid}")


def _jump(number: int, frame: FrameType | None) -> None:
    file = _clock(os.getpid())
    time_machine.travel(time.time() + int(file.read_text())).start()
    file.unlink()


def _train(recipe: str, folder: str, overrides: tuple[str, ...], own_session: bool) -> None:
    import torch

    from unirl.cli.main import main

    if own_session:
        os.setsid()
    signal.signal(signal.SIGRTMIN, _jump)
    torch.set_num_threads(1)
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = main(["train", recipe, *overrides, f"run.dir={folder}"])
    atexit._run_exitfuncs()  # which the end of an interpreter runs, and that of such a process does not
    sys.exit(status)
