"""A reward service that answers as a test says: no workers, no scorers, in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from unirl.reward.client.wire import JSON, MSGPACK, ScoreItem, ScoreRequest, ScoreResponse, decode, encode


@dataclass
class Reply:
    """One answer; None as the body closes the connection instead."""

    body: bytes | None
    status: int = 200
    content_type: str = MSGPACK
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    """What Content-Length says; None: the truth."""


Answer = Callable[[list[ScoreItem], int], Reply]
"""(items, number of the POST from 0) -> reply."""


@dataclass
class Stub:
    url: str
    posts: list[list[ScoreItem]]
    headers: list[Mapping[str, str]]
    paths: list[str]


def scores(items: Sequence[ScoreItem], content_type: str = MSGPACK, reward: str = "odd") -> Reply:
    """Twice the length of each item's text."""
    results: list[Any] = [{reward: {"total": 2.0 * len(item.history[0].text)}} for item in items]
    return Reply(encode(ScoreResponse(results=results, errors=[{} for _ in items]), content_type), 200, content_type)


@contextmanager
def stub(
    answer: Answer, rewards: Sequence[str] = ("odd",), health: Callable[[], Reply] | None = None
) -> Iterator[Stub]:
    """A running stub. Every POST that can be read is noted."""
    seen = Stub("", [], [], [])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.paths.append(self.path)
            roster = {"status": "ok", "rewards": {name: [True] for name in rewards}}
            self._send(health() if health else Reply(json.dumps(roster).encode(), 200, JSON))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            items = decode(ScoreRequest, body, self.headers["content-type"]).requests
            with lock:
                number = len(seen.posts)
                seen.posts.append(items)
                seen.headers.append(dict(self.headers))
            self._send(answer(items, number))

        def _send(self, reply: Reply) -> None:
            if reply.body is None:
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("content-type", reply.content_type)
            self.send_header("content-length", str(len(reply.body) if reply.length is None else reply.length))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)
            self.close_connection = reply.length is not None

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def plain(value: object) -> bytes:
    return msgspec.json.encode(value)
