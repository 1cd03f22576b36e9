"""The command `python -m reward_service CONFIG.yaml`, which runs the service."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from reward_service.app import Service, make_app
from reward_service.config import ServiceConfig, read_config, read_token
from reward_service.frames import end_with_parent
from unirl.config.errors import AddressError, DependencyError, UniRLError, report


def protocol_with_header_timeout(header_s: float) -> type[H11Protocol]:
    """Returns uvicorn's HTTP protocol with a timeout for headers, after which the connection is closed.

    h11 limits the size of headers to 64 KiB.
    """

    class HeaderTimeoutProtocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._unwatch()
            elif self._late is None:
                self._late = self.loop.call_later(header_s, self.transport.close)

        def _unwatch(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return HeaderTimeoutProtocol


GRACE_S = 10
"""Seconds that requests in progress may take after a signal to stop."""


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


async def serve(config: ServiceConfig) -> None:
    """Loads every scorer, then serves until SIGINT or SIGTERM.

    Raises:
        UniRLError: the address is not allowed or in use, or a scorer cannot be loaded.
    """
    server, limits = config.server, config.server.limits
    token = read_token(server)
    listening = listen(server.host, server.port)
    service = Service(config)
    try:
        await service.start()
        listening.listen()  # who reads the line below may connect at once
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {', '.join(service.rewards)} at http://{shown}:{port}", flush=True)
        settings = uvicorn.Config(
            make_app(service, token),
            http=protocol_with_header_timeout(limits.header_s),
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=GRACE_S,
        )
        await Server(settings).serve([listening])
    finally:
        await service.close()
        listening.close()


class Server(uvicorn.Server):
    """A server whose process ends with status 0 after SIGINT or SIGTERM, when everything is closed."""

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
