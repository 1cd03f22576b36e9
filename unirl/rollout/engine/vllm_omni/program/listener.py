"""An HTTP server of the standard library, with one thread per connection. Fake servers of other engines use it, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 2**34
"""Largest request that is read."""
JSON = "application/json"


@dataclass(frozen=True)
class WireReply:
    """A response."""

    status: int
    body: bytes
    content_type: str | None = JSON
    """None: it has none."""
    cut: float | None = None
    """The share of the body that is sent before the connection closes. None: all of it. 0: no response at all."""


Handler = Callable[[memoryview], WireReply]
"""Answers a request. Its body is valid until the handler returns."""


def json_reply(body: object, status: int = 200) -> WireReply:
    """A response with a JSON body."""
    return WireReply(status, json.dumps(body).encode())


class WireServer(ThreadingHTTPServer):
    """Answers while its `serve_forever` runs, with one thread per connection."""

    daemon_threads = True
    request_queue_size = 128

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return f"http://{LOOPBACK}:{self.server_port}"


NOT_FOUND = json_reply({"error": "there is no such path"}, 404)


def wire_server(port: int, routes: Mapping[tuple[str, str], Handler], not_found: WireReply = NOT_FOUND) -> WireServer:
    """A server of the loopback interface that answers with `routes`. Port 0 takes a free one."""

    class WireHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        buffer = bytearray()
        """The memory of the bodies of a connection. New memory for each of them would take longer than reading them."""

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            length = int(self.headers.get("content-length") or 0)
            if length > MAX_BODY_BYTES:
                self.close_connection = True
                return self._send(json_reply({"error": f"the body has {length} bytes"}, 413))
            if length > len(self.buffer):
                self.buffer = bytearray(length)
            body = memoryview(self.buffer)[:length]
            self.rfile.readinto(body)
            handler = routes.get((method, urlsplit(self.path).path))
            self._send(handler(body) if handler else not_found)

        def _send(self, reply: WireReply) -> None:
            if reply.cut == 0:
                self.close_connection = True
                return
            self.send_response(reply.status)
            if reply.content_type is not None:
                self.send_header("content-type", reply.content_type)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            if reply.cut is not None:
                self.close_connection = True
            end = len(reply.body) if reply.cut is None else int(len(reply.body) * reply.cut)
            self.wfile.write(reply.body[:end])

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return WireServer((LOOPBACK, port), WireHandler)
