"""A server process of an engine: started on the loopback interface, watched, restarted, and stopped with its children.

start -> wait_ready -> (is_alive, tail) ... -> stop
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from unirl.config.errors import EngineError
from unirl.distributed.group.reaper import kill_on_exit
from unirl.types.progress import progress

LOOPBACK = "127.0.0.1"
STOP_S = 5.0
"""Seconds that a server has to end by itself before it is killed."""
POLL_S = 0.1
SHOWN_LINES = 8
"""Lines at the end of the log that an error message quotes."""
SHOWN_BYTES = 4000


def free_port() -> int:
    """A port of the loopback interface on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def spawn(words: Sequence[str], log: BinaryIO, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program whose output goes to `log`, as the leader of its own process group.

    Ctrl-C is for the run, which finishes its step. The children of the program end with its group.
    """
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env
    )


@dataclass(eq=False)
class ServerProcess:
    """One server process. It and its children end with the process that started it, however that ends."""

    name: str
    """The name of the server in error messages."""
    words: Sequence[str]
    """The command line."""
    log: Path
    """Its output is appended to this file."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it gets in addition to those of this process."""
    num_starts: int = 0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process. Raises EngineError if its program cannot be run."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("ab") as log:
                log.write(f"--- {' '.join(self.words)}\n".encode())
                log.flush()
                self._process = spawn(self.words, log, os.environ | dict(self.env))
        except OSError as error:
            raise EngineError(f"{self.name} cannot be started: {error}. Command: {' '.join(self.words)}") from error
        self.num_starts += 1
        reaper = kill_on_exit([self._process.pid], groups=True)
        self._end = weakref.finalize(self, end_group, self._process, reaper)

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `is_ready()`. Raises EngineError, with the end of the log, if the process ends or is too late."""
        start = time.monotonic()
        while not is_ready():
            if not self.is_alive:
                raise EngineError(f"{self.name} ended {self.ending} before it answered. {self.tail()}")
            if time.monotonic() - start > deadline_s:
                self.stop()
                raise EngineError(
                    f"{self.name} did not answer within rollout.start_timeout_s={deadline_s:g} s. Raise it for a large "
                    f"model. {self.tail()}"
                )
            progress(f"{self.name} starts")
            time.sleep(POLL_S)

    @property
    def ending(self) -> str:
        """How the process ended: `with exit status 1` or `by signal SIGKILL`."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return "(it has not started)"
        return f"by signal {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"

    def tail(self) -> str:
        """The place of the log and its last lines."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN_BYTES))
            lines = [line for line in log.read(SHOWN_BYTES).decode(errors="replace").splitlines() if line.strip()]
            return "\n  ".join([f"Its log is {self.log}; the last lines are:", *lines[-SHOWN_LINES:]])
        return f"Its log {self.log} cannot be read."

    def stop(self) -> None:
        """End the process and its children, and wait until they have ended."""
        self._end()
        self._process = None


def end_group(process: subprocess.Popen[bytes], reaper: subprocess.Popen[bytes]) -> None:
    """End a process group: first by a request, then by force. The reaper then has nothing left to do."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert reaper.stdin is not None
    reaper.stdin.close()
    reaper.wait()
