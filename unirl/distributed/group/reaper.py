"""Kills processes when the process that started this one is gone, however it ended.

    python reaper.py PID...

Ray's agents notice within seconds, on a busy machine within minutes, that the rest of their cluster is gone. This
process does not wait for them: its standard input closes when the driver ends, and then it kills the given processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def kill_on_exit(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that kills `pids` when this process is gone, or when its standard input is closed."""
    words = [sys.executable, "-S", "-E", __file__, *map(str, pids)]
    # In its own session: a signal to the driver's process group must not end it.
    return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


def main(pids: Sequence[int]) -> None:
    """Wait for the end of standard input, then kill `pids`. A process that got one of these ids later is not killed."""
    handles = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    sys.stdin.buffer.read()
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
