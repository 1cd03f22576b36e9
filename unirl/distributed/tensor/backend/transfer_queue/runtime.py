"""The processes of a service that carries rows: where they listen, and whether one of them is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from unirl.config.errors import AddressError, InvalidValueError, LostWorkerError, StallError

T = TypeVar("T")

CONNECT_S = 2.0
PROBE_S = 1.0
"""Seconds between two looks at the processes of the service while a call of it runs."""


@dataclass(frozen=True)
class ServiceProcess:
    """A process of the service, by its role and the place where it listens."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} at {self.host}:{self.port}"

    def refusal(self) -> OSError | None:
        """Why no connection is possible. None if one is."""
        try:
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except OSError as error:
            return error
        return None


def endpoint(name: str, key: str, address: str) -> ServiceProcess:
    """The process at `HOST:PORT` or `http://HOST:PORT/...`, the value of a key.

    Raises:
        ConfigError: 2004 for an address of another form.
    """
    place = address.partition("://")[2] or address
    host, _, port = place.partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidValueError(f"{key}={address} is not HOST:PORT, as `mooncake_master` prints it when it starts")
    return ServiceProcess(name, host.strip("[]"), int(port))


def check_listening(key: str, process: ServiceProcess, way_out: str) -> None:
    """Raises DependencyError (3003) when nothing listens at the address that a key gives."""
    refusal = process.refusal()
    if refusal is not None:
        raise AddressError(f"{key}: no {process} ({refusal}). {way_out}")


def guarded(what: str, work: Callable[[], T], processes: Sequence[ServiceProcess], deadline_s: float) -> T:
    """The result of a call of the service, which runs in a thread of its own.

    Args:
        what: the call in error messages.
        processes: the processes that take part.

    Raises:
        LostWorkerError: the call failed or hangs, and a process of the service is gone.
        StallError: the call did not end in time.
    """
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, work), name=what, daemon=True).start()
    end = monotonic() + deadline_s
    while True:
        failure: BaseException | None = None
        with suppress(TimeoutError):
            failure = future.exception(PROBE_S)
            if failure is None:
                return future.result()
        for process in processes:
            refusal = process.refusal()
            if refusal is not None:
                raise LostWorkerError(f"the {process} is gone ({refusal}), seen while {what}") from failure
        if failure is not None:
            raise failure
        if monotonic() > end:
            names = ", ".join(map(str, processes))
            raise StallError(f"{what} took more than {deadline_s:g} s, though there is a listener for each of: {names}")


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised again where the caller waits for the future
        future.set_exception(error)
