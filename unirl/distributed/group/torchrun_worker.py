"""The worker of a rank that torchrun started: answers the driver's calls in order, and its questions meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from operator import methodcaller

from unirl.config.errors import WorkerError, report
from unirl.distributed.group.failures import WorkerFailure
from unirl.distributed.group.torchrun import DriverAddress, TorchrunRank, find_driver, packed, unpacked
from unirl.distributed.group.worker import RemoteWorker
from unirl.types.device import accelerator

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Stop signals. torchrun and a scheduler send them to every rank; the driver finishes its step and ends the others."""
END = b""
"""The message after which a worker ends."""


def serve_rank(own: TorchrunRank) -> int:
    """Run the worker of a rank other than 0 until the driver ends. Returns the exit status of the process."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    driver = find_driver(own)
    return 0 if driver is None or serve(own, driver, ends_process=True) else WorkerError.exit_status


def serve(own: TorchrunRank, driver: DriverAddress, ends_process: bool) -> bool:
    """Answer calls until the driver ends the worker. Returns False if the driver's process ended before.

    Args:
        ends_process: True where the worker is the whole process, which ends at once with the driver's.
    """
    try:
        calls = driver.connect()
        about = (own_address(calls), os.getpid())
        calls.send_bytes(packed((own.rank, "calls", about)))
        paths, deadline_s = unpacked(calls.recv_bytes())
    except (EOFError, OSError):  # the driver has failed, and says why
        return False
    sys.path.extend(path for path in paths if path not in sys.path)
    worker = TorchrunWorker(own, about[0], deadline_s)
    questions = driver.connect()
    questions.send_bytes(packed((own.rank, "questions", about)))
    arguments = (worker, questions, ends_process)
    threading.Thread(target=_answer_questions, args=arguments, name="questions", daemon=True).start()
    with calls:
        while (message := _received(calls)) is not None:
            if message == END:
                return True
            what, method, args = unpacked(message)
            calls.send_bytes(_packed(what, worker, worker.attempt(what, method, *args)))
    return False


class TorchrunWorker(RemoteWorker):
    """A worker on the GPU with the number LOCAL_RANK, or on the CPU."""

    def __init__(self, own: TorchrunRank, host: str, deadline_s: float) -> None:
        name, device = worker_name(own.rank), accelerator(own.local_rank)
        super().__init__(name, f"device {own.rank}", host, True, deadline_s, device=device)


def own_address(connection: Connection) -> str:
    """The address of this machine that the other end of a connection sees, and that other machines reach as well."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return str(end.getsockname()[0])


def worker_name(rank: int) -> str:
    """The name of the worker of a rank, under which its rows are known."""
    return f"torchrun-{rank}"


def _answer_questions(worker: RemoteWorker, questions: Connection, ends_process: bool) -> None:
    while (message := _received(questions)) is not None and message != END:
        method, args = unpacked(message)
        questions.send_bytes(_packed(method, worker, methodcaller(method, *args)(worker)))
    if message is None and ends_process:
        error = WorkerError(f"{worker.about()} ends, because the driver, which is rank 0, has ended")
        print(report(error), file=sys.stderr, flush=True)
        os._exit(WorkerError.exit_status)


def _received(connection: Connection) -> bytes | None:
    """The next message. None when the other process is gone."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None


def _packed(what: str, worker: RemoteWorker, result: object) -> bytes:
    """A result as bytes, or the failure that it cannot be sent."""
    try:
        return packed(result)
    except Exception as error:  # whatever the result's own code raises while it is packed
        return packed(WorkerFailure.of(error, what, str(worker.about())))
