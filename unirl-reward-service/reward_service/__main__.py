"""The command `python -m reward_service CONFIG.yaml`, which runs the service."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import uvicorn

from reward_service.app import Service, make_app
from reward_service.config import ServiceConfig, check_tls, read_config, read_token
from reward_service.connections import limited_protocol
from reward_service.frames import end_with_parent
from unirl.config.errors import AddressError, DependencyError, UniRLError, report

GRACE_S = 1
"""Seconds that responses may take to be sent after the requests in progress have ended."""
HEAP_THRESHOLD = 2**22
"""Blocks of at least this many bytes are returned to the system when they are freed."""
HEAP_FREE = 2**24
"""Largest number of free bytes at the end of a heap that are kept."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the service until it is stopped. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="unirl-reward-service", description="Score samples over HTTP.")
    parser.add_argument("config", help="the YAML file with the blocks server, rewards and plugins")
    parser.add_argument("--host", help="overrides server.host")
    parser.add_argument("--port", type=int, help="overrides server.port")
    parser.add_argument("--token-file", help="overrides server.token_file")
    parser.add_argument("--toy", action="store_true", help="use tiny random networks: no downloads")
    parser.add_argument("--with-parent", action="store_true", help="stop when standard input closes")
    given = parser.parse_args(arguments)
    if given.with_parent:
        end_with_parent()
    return_large_blocks()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        typed = {key: getattr(given, key) for key in ("host", "port", "token_file") if getattr(given, key) is not None}
        config = read_config(given.config, **typed)
        config = replace(config, toy=config.toy or given.toy)
        asyncio.run(serve(config))
    except UniRLError as error:
        print(report(error), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


def return_large_blocks() -> None:
    """Lets the C library return freed bodies and pixels to the system instead of keeping them in its heaps."""
    trim_threshold, mmap_threshold, max_arenas = -1, -3, -8  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
    with suppress(AttributeError, OSError):  # only glibc has mallopt
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, HEAP_FREE)
        library.mallopt(mmap_threshold, HEAP_THRESHOLD)
        library.mallopt(max_arenas, 2)


async def serve(config: ServiceConfig) -> None:
    """Loads every scorer, then serves until SIGINT or SIGTERM.

    Raises:
        UniRLError: the address is not allowed or in use, or a scorer cannot be loaded.
    """
    server = config.server
    token = read_token(server)
    check_tls(server)
    listening = listen(server.host, server.port)
    service = Service(config)
    settings = uvicorn.Config(
        make_app(service, token),
        http=limited_protocol(server.limits),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=server.limits.connections,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=server.tls_cert,
        ssl_keyfile=server.tls_key,
    )
    serving = asyncio.ensure_future(Server(settings, service).serve([listening]))
    starting = asyncio.ensure_future(service.start())
    try:
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await starting
            listening.listen()  # who reads the line below may connect at once
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            scheme = "http" if server.tls_cert is None else "https"
            print(f"serving {', '.join(service.rewards)} at {scheme}://{shown}:{port}", flush=True)
        await serving
    finally:
        for task in (starting, serving):
            task.cancel()
        await asyncio.wait([starting, serving])
        await service.close()
        listening.close()


class Server(uvicorn.Server):
    """A server that drains after SIGINT or SIGTERM, and whose process then ends with status 0.

    A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet.

    Raises DependencyError (3003) when the address is in use or unknown.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise cannot_listen(host, port, error) from error
    return listening


def cannot_listen(host: str, port: int, error: OSError) -> DependencyError:
    return AddressError(
        f"server: cannot listen on {host}:{port}: {error.strerror}. Choose another port, or 0 for a free one"
    )


if __name__ == "__main__":
    sys.exit(main())
