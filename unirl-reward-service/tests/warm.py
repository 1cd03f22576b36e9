"""An interpreter that starts workers at once: forked from a process that has imported torch, which takes seconds.

For services that tests start, as `python` of a reward. A launcher stands where the interpreter would: its arguments are
those of a worker, its end is the worker's end, and the worker's end is its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import forkserver

LAUNCHER = """\
#!{python} -SE
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = [*sys.argv[1:], "", *map("=".join, os.environ.items())]
    socket.send_fds(server, ["\\0".join(words).encode()], [0, 1, 2, int(sys.argv[-1])])
    os.close(int(sys.argv[-1]))
    status = server.recv(1)
os.kill(os.getpid(), signal.SIGKILL) if not status else sys.exit(status[0])
"""


@contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    """The path of the launcher; this process's own interpreter where a first line cannot name it."""
    if " " in sys.executable:
        yield sys.executable
        return
    address, launcher = folder / "s", folder / "warm_python"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    launcher.write_text(LAUNCHER.format(python=sys.executable, address=str(address)))
    launcher.chmod(0o755)
    server = forkserver().Process(target=answer, args=(listener,), daemon=True)
    server.start()
    listener.close()
    yield str(launcher)
    server.kill()
    server.join()


def answer(listener: socket.socket) -> None:
    """Fork a worker for every launcher that calls."""
    import reward_service.worker  # noqa: F401 - what every worker needs

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        launcher, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(launcher)
        launcher.close()


def work(launcher: socket.socket) -> None:
    """Become the process that the launcher stands for."""
    data, descriptors, _, _ = socket.recv_fds(launcher, 2**20, 4)
    words = data.decode().split("\0")
    arguments, variables = words[: words.index("")], words[words.index("") + 1 :]
    for place, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, place)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(word.split("=", 1) for word in variables)
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    threading.Thread(target=end_with, args=(launcher,), daemon=True).start()
    _, module, *rest = arguments  # -m MODULE NAME SOCKET
    sys.argv = [module, *rest[:-1], str(descriptors[3])]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        status = 1
    with suppress(OSError):
        launcher.send(bytes([status]))
    os._exit(status)


def end_with(launcher: socket.socket) -> None:
    launcher.recv(1)
    os._exit(0)
