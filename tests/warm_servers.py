"""Servers of engines as processes that find everything imported, over which each start takes five seconds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tests.processes import become, forkserver, wait_until
from unirl.rollout.engine.serving import process

START_S = 60.0
COLD = process.spawn


class WarmProcess:
    """What an engine uses of the `subprocess.Popen` of a Python program. It leads a session of its own."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        log.touch()  # whoever reads it need not wait for the process
        self._lock = threading.Lock()
        self._process = forkserver().Process(target=lead, args=(list(words), log, dict(env)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        assert wait_until(self._leads, START_S), "who ends it signals its group"

    def _leads(self) -> bool:
        try:
            return os.getpgid(self.pid) == self.pid
        except ProcessLookupError:  # it has ended
            return True

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended it. None: it runs."""
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float = math.inf) -> int:
        """Raises TimeoutExpired when it still runs after `timeout` seconds."""
        if not wait_until(lambda: self.poll() is not None, timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._process.kill()
        self._process.join()


def lead(words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run `python *words` in this process, as the leader of a session."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    become(words, log)


def spawn(words: Sequence[str], log: BinaryIO, env: Mapping[str, str]) -> Any:
    """Starts a module that this interpreter runs as a WarmProcess, and any other program as the engine does."""
    if list(words[:2]) == [sys.executable, "-m"]:
        return WarmProcess(words[1:], Path(log.name), env)
    return COLD(words, log, env)
