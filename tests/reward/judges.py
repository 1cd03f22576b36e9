"""A server on this machine that answers as an OpenAI-compatible endpoint does, or fails as one may."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Asked:
    """One question as it arrived."""

    picture: np.ndarray  # [H, W, 3] uint8
    question: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True)
class Said:
    """What the server sends back; `body` replaces a well-formed completion, `drop` closes the connection at once."""

    text: str = ""
    tokens: dict[str, float] | None = None  # log-probs of the first token
    finish: str = "stop"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    drop: bool = False


def completion(said: Said) -> bytes:
    top = [{"token": token, "logprob": value, "bytes": None} for token, value in (said.tokens or {}).items()]
    logprobs = {"content": [{"token": "x", "logprob": 0.0, "top_logprobs": top}]} if said.tokens is not None else None
    choice = {"index": 0, "message": {"role": "assistant", "content": said.text}, "finish_reason": said.finish,
              "logprobs": logprobs}  # fmt: skip
    return json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": {}}).encode()


class JudgeServer:
    """Answers with what `answer(asked)` says; counts what it was asked."""

    def __init__(self, answer: Callable[[Asked], Said]) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.listed = Said(status=404, body=b"")
        """The answer of /models."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = owner.listed if self.path == "/v1/models" else Said(status=404, body=b"")
                self.answer(said, said.body or b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                image, text = body["messages"][0]["content"]
                file = io.BytesIO(base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")))
                asked = Asked(np.asarray(Image.open(file)), text["text"], body, dict(self.headers))
                owner.asked.append(asked)
                said = owner.answer(asked) if self.path == "/v1/chat/completions" else Said(status=404)
                if said.drop:
                    self.close_connection = True
                    return
                self.answer(said, completion(said) if said.body is None else said.body)

            def answer(self, said: Said, content: bytes) -> None:
                self.send_response(said.status)
                for name, value in {"Content-Length": str(len(content)), **said.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *about: None  # type: ignore[method-assign]  # clients that hang up are meant to
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
