"""Ends processes when the one that started them is gone, however it ended.

    python reaper.py PID...

Ray's agents notice within seconds, on a busy machine within minutes, that the rest of their Ray is gone. This process
does not wait for them: its standard input closes with the driver, and then it kills what it was told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def outlive(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that kills `pids` once this one is gone. Close its standard input to have it do so now."""
    words = [sys.executable, "-S", "-E", __file__, *map(str, pids)]
    # In a session of its own: what stops the driver's process group must not stop it.
    return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


def main(pids: Sequence[int]) -> None:
    """Wait for the end of standard input, then kill `pids`; a number that another process has by then is spared."""
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
