"""An HTTP server of JSON messages with one thread per connection, from the standard library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import msgspec

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 2**30
"""Largest request that is read."""


@dataclass(frozen=True)
class JsonReply:
    """A response. Bytes are sent as they are."""

    status: int = 200
    body: object = b""
    cut: float | None = None
    """The share of the body that is sent before the connection closes. None: all of it. 0: no response at all."""


Handler = Callable[[object], JsonReply]
Routes = Mapping[tuple[str, str], Handler]
"""Method and path to the function that answers."""


class JsonServer(ThreadingHTTPServer):
    """Answers while its `serve_forever` runs."""

    daemon_threads = True
    request_queue_size = 128

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return f"http://{LOOPBACK}:{self.server_port}"


def json_server(port: int, routes: Routes) -> JsonServer:
    """A server of the loopback interface that answers with `routes`. Port 0 takes a free one."""

    class JsonConnection(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            length = int(self.headers.get("content-length") or 0)
            if length > MAX_BODY_BYTES:
                self.close_connection = True
                return self._send(JsonReply(413, {"error": {"message": f"the body has {length} bytes"}}))
            content = self.rfile.read(length)
            handler = routes.get((method, urlsplit(self.path).path))
            if handler is None:
                return self._send(JsonReply(404, {"detail": "Not Found"}))
            try:
                body = msgspec.json.decode(content) if content else {}
            except msgspec.DecodeError as error:
                return self._send(JsonReply(400, {"object": "error", "message": str(error)}))
            self._send(handler(body))

        def _send(self, reply: JsonReply) -> None:
            is_raw = isinstance(reply.body, bytes)
            data = reply.body if isinstance(reply.body, bytes) else msgspec.json.encode(reply.body)
            if reply.cut == 0:
                self.close_connection = True
                return
            self.send_response(reply.status)
            if not is_raw:
                self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if reply.cut is not None:
                self.close_connection = True
                data = data[: int(len(data) * reply.cut)]
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return JsonServer((LOOPBACK, port), JsonConnection)
