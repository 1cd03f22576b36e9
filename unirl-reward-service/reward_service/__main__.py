"""python -m reward_service CONFIG.yaml"""

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


def impatient(header_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, which has no such limit, closing a connection `header_s` after it began to wait for headers.

    Their size is bounded by h11 (64 KiB).
    """

    class Impatient(H11Protocol):
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

    return Impatient


GRACE_S = 10
"""What is being scored when the service is asked to stop may take so long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; the exit status of the process."""
    parser = argparse.ArgumentParser(prog="unirl-reward-service", description="Score media over HTTP.")
    parser.add_argument("config", help="the YAML file: server, rewards, plugins")
    parser.add_argument("--host", help="instead of server.host")
    parser.add_argument("--port", type=int, help="instead of server.port")
    parser.add_argument("--token-file", help="instead of server.token_file")
    parser.add_argument("--toy", action="store_true", help="the scorers' own small values: no downloads")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
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
    """Load every scorer, then answer until SIGINT or SIGTERM.

    Raises:
        UniRLError: it may not listen there, the port is taken, or a scorer cannot be loaded.
    """
    server, limits = config.server, config.server.limits
    token = read_token(server)
    listening = listen(server.host, server.port)
    service = Service(config)
    try:
        await service.start()
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {', '.join(service.rewards)} at http://{shown}:{port}", flush=True)
        settings = uvicorn.Config(
            make_app(service, token),
            http=impatient(limits.header_s),
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
    """Ends its process as a success when it is asked to stop, after what is still to be closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises DependencyError (3003) when the address is taken or unknown."""
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
