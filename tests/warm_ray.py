"""Workers of Ray as forks of a process that has imported what they need, over which each start takes seconds.

`warm_workers` starts that process, and Ray clusters that start afterwards take their workers from it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.processes import forkserver, wait_until
from tests.warm_ray_worker import SOCKET
from unirl.distributed.group import ray_cluster

SHIM = Path(__file__).with_name("warm_ray_worker.py")
START_S = 120.0
START = ray_cluster._init


@contextmanager
def warm_workers() -> Iterator[None]:
    """Within the block, clusters that this process and its children start have warm workers (`use_warm_workers`)."""
    use_warm_workers()
    with tempfile.TemporaryDirectory(prefix="unirl-ray-") as folder:
        path = Path(folder, "socket")
        server = forkserver().Process(target=serve, args=(str(path),), daemon=True)
        server.start()
        assert wait_until(path.exists, START_S)
        os.environ[SOCKET] = str(path)
        try:
            yield
        finally:
            del os.environ[SOCKET]
            server.kill()
            server.join()


def use_warm_workers() -> None:
    """Clusters that this process starts from now on have warm workers, while `SOCKET` is in the environment."""
    ray_cluster._init = start


def start(num_cpus: int) -> None:
    """`ray_cluster._init` with another program that sets workers up."""
    with warm_nodes():
        START(num_cpus)


@contextmanager
def warm_nodes() -> Iterator[None]:
    """Nodes that this process starts within the block have warm workers, while `SOCKET` is in the environment."""
    from ray._private.parameter import RayParams

    made = RayParams.__init__

    def with_shim(self: RayParams, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.setup_worker_path = str(SHIM)
        self.include_log_monitor, self.no_monitor = False, True  # nobody reads logs, and no node is added by itself

    with pytest.MonkeyPatch.context() as patch:
        if SOCKET in os.environ:
            patch.setattr(RayParams, "__init__", with_shim)
        yield


def serve(path: str) -> None:
    """Serve at a socket until the tests' process ends."""
    assert "ray" not in sys.modules, "Ray reads the environment of a worker when it is imported"
    os.setsid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(128)
    os.rename(f"{path}.new", path)
    Server(listener).serve()


class Server:
    """Forks a worker for each request. A request whose connection closes loses its worker."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        tests = multiprocessing.parent_process()
        assert tests is not None
        self.selector.register(tests.sentinel, selectors.EVENT_READ, lambda: os._exit(0))

    def serve(self) -> None:
        """Never returns."""
        while True:
            for key, _ in self.selector.select():
                if key.fd in self.selector.get_map():  # the event before it may have ended it
                    key.data()

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        size, received = int.from_bytes(head, "big"), b""
        while len(received) < size and (more := connection.recv(size - len(received))):
            received += more
        if len(received) == size:
            pid = os.fork()
            if not pid:
                self.selector.close()
                self.listener.close()
                connection.close()
                become_worker(json.loads(received), files)
            self.watch(pid, connection)
        for file in files:
            os.close(file)

    def watch(self, pid: int, connection: socket.socket) -> None:
        handle = os.pidfd_open(pid)

        def ended() -> None:
            _, status = os.waitpid(pid, 0)
            self.selector.unregister(handle)
            os.close(handle)
            with suppress(KeyError):
                self.selector.unregister(connection)
            with suppress(OSError):  # who asked for it may be gone
                connection.send(bytes([os.waitstatus_to_exitcode(status) & 255]))
            connection.close()

        def left() -> None:
            self.selector.unregister(connection)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

        self.selector.register(handle, selectors.EVENT_READ, ended)
        self.selector.register(connection, selectors.EVENT_READ, left)


def become_worker(request: dict, files: list[int]) -> None:
    """Run a worker of Ray in this process. Does not return."""
    status = 1
    try:
        os.setpgid(0, 0)  # Ray kills the group of a worker that has died
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.chdir(request["folder"])
        paths = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = dict.fromkeys([*filter(None, paths), *sys.path])
        set_threads()
        sys.argv = request["words"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def set_threads() -> None:
    """The number of threads that the environment asks for: torch has read that of the process before the fork."""
    if wanted := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(wanted))
