"""The checks of every request before its route: its id, the names of the service, and the token."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from uuid import uuid4

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_service.config import ServerConfig, is_loopback
from reward_service.metrics import Metrics
from unirl.reward.client.wire import JSON, Refusal, encode

log = logging.getLogger("reward_service")

PROBES = ("/live", "/ready")
"""Routes that answer without a token and under any name, since load balancers ask them. They reveal nothing else."""
HOST, AUTHORIZATION, REQUEST_ID = b"host", b"authorization", b"x-request-id"
READ = (HOST, AUTHORIZATION, REQUEST_ID)
PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_DETAIL = 1000
"""Largest number of characters of a refusal, which may repeat what the client has sent."""


def refusal(status: int, kind: str, detail: str, retry_after_s: int | None = None) -> Response:
    """Returns a typed response that is not a success."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Response(encode(Refusal(kind=kind, detail=detail[:MAX_DETAIL]), JSON), status, headers, JSON)


class Gate:
    """Gives every request an id, refuses those without the token or under another name, counts and logs them."""

    def __init__(self, app: ASGIApp, server: ServerConfig, token: str | None, metrics: Metrics) -> None:
        self._app, self._metrics, self._server = app, metrics, server
        self._is_own_name = lru_cache(maxsize=256)(lambda header: is_own_name(host_of(header[:300]), server))
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in reversed(scope["headers"]) if name in READ}
        given = headers.get(REQUEST_ID, b"").decode("latin-1")
        request_id = given if PLAIN_ID.fullmatch(given) else uuid4().hex
        scope["request_id"] = request_id
        begun = time.monotonic()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id.encode())]
                route = scope.get("route")
                self._metrics.requests.labels(getattr(route, "path", "other"), message["status"]).inc()
                if self._server.log_requests or message["status"] >= 400:
                    self._log(scope, message["status"], time.monotonic() - begun)
            await send(message)

        refused = None if scope["path"] in PROBES else self._refusal(headers)
        await (refused or self._app)(scope, receive, counted)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> Response | None:
        """Returns the response to a request that may not pass."""
        host = headers.get(HOST, b"").decode("latin-1")
        if not self._is_own_name(host):
            names = ", ".join(self._server.host_names) or "localhost or 127.0.0.1"
            return refusal(421, "wrong_host", f"Host {host[:300]!r}: call {names}, or add it to server.host_names")
        given = headers.get(AUTHORIZATION, b"")
        if self._expected is None or hmac.compare_digest(given, self._expected):
            return None
        answer = refusal(
            401, "unauthorized", "send the token of the service in the header Authorization: Bearer <token>"
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope["client"][0] if scope.get("client") else "?"
        log.info(
            "request %s of %s: %s %r -> %d in %.3f s",
            scope["request_id"],
            client,
            scope["method"],
            scope["path"][:100],
            status,
            seconds,
        )


def host_of(header: str) -> str:
    """Returns the name or address in a Host header, without its port and the brackets of IPv6."""
    name = header.rpartition(":")[0] if re.search(r":\d*$", header) and not header.endswith("]") else header
    return name.strip("[]").lower()


def is_own_name(host: str, server: ServerConfig) -> bool:
    """Returns True if clients may call the service by this name or address."""
    names: Sequence[str] = [name.lower() for name in server.host_names]
    if names:
        return host in names
    return not is_loopback(server.host) or is_loopback(host)
