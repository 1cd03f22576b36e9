"""Kills processes when the process that started this one is gone, however it ended.

    python reaper.py [--groups] PID...

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


def kill_on_exit(pids: Sequence[int], *, groups: bool = False) -> subprocess.Popen[bytes]:
    """Start a process that kills `pids` when this process is gone, or when its standard input is closed.

    Args:
        groups: each of them leads a process group, which is killed as a whole.
    """
    words = [sys.executable, "-S", "-E", __file__, *(["--groups"] if groups else []), *map(str, pids)]
    # In its own session: a signal to the driver's process group must not end it.
    return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


def main(pids: Sequence[int], groups: bool) -> None:
    """Wait for the end of standard input, then kill `pids`. A process that got one of these ids later is not killed."""
    handles = {}
    for pid in pids:
        with suppress(ProcessLookupError):
            handles[pid] = os.pidfd_open(pid)
    sys.stdin.buffer.read()
    for pid, handle in handles.items():
        with suppress(ProcessLookupError):
            if groups:
                # A group keeps its id as long as it has a member, also after its leader has ended.
                os.killpg(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    words = sys.argv[1:]
    main([int(word) for word in words if word != "--groups"], "--groups" in words)
