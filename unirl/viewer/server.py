"""Serves a viewer until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Callable

from unirl.viewer.guard import App

GRACE_S = 2
MAX_REQUESTS = 200
"""Requests at the same time. Further ones are refused with status 503."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(128)
    except OSError:
        opened.close()
        raise
    return opened


def address_of(opened: socket.socket) -> str:
    """The address of a socket as a browser takes it."""
    host, port = opened.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def serve(app: App, opened: socket.socket, on_server: Callable[[Callable[[], None]], None] | None = None) -> None:
    """Answers requests until SIGINT or SIGTERM.

    Args:
        on_server: is given a function that stops the server from another thread.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_REQUESTS,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    if on_server is not None:
        on_server(lambda: setattr(server, "should_exit", True))
    server.run(sockets=[opened])
