"""The judge of toy scale: an OpenAI-compatible endpoint whose replies have the right form and no meaning."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

WORDS: Sequence[str] = (
    "yes", "no", "one", "two", "three", "four", "five", "six",
    "black", "blue", "brown", "green", "orange", "pink", "purple", "red", "white", "yellow",
)  # fmt: skip
LABELS: Sequence[str] = (
    "Consistency", "Realism", "Aesthetic Quality", "Alignment Score", "Coherence Score", "Style Score",
)  # fmt: skip
MAX_QUESTION = 64 * 2**20
"""Largest request body, in bytes."""


@cache
def toy_endpoint() -> str:
    """Returns the address of the endpoint of this process, and starts it on the first call."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="toy judge", daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """Replies with a hash of the image and the question."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        if length > MAX_QUESTION:
            self.send_error(413)
            return
        request = msgspec.json.decode(self.rfile.read(length))
        content = completion(request["messages"][0]["content"], bool(request.get("logprobs")))
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def completion(content: object, alternatives: bool) -> bytes:
    """Returns the reply to a message: a grade of 1 or 2 for every label, or probabilities of the first word."""
    digest = hashlib.blake2b(msgspec.json.encode(content)).digest()
    if alternatives:
        masses = [1 + byte for byte in digest[: len(WORDS)]]
        logprobs = [math.log(mass / sum(masses)) for mass in masses]
        top = [{"token": word, "logprob": logprob} for word, logprob in zip(WORDS, logprobs, strict=True)]
        choice = {
            "message": {"content": WORDS[0]},
            "finish_reason": "length",
            "logprobs": {"content": [{"top_logprobs": top}]},
        }
    else:
        grades = "\n".join(f"{label}: {byte % 2 + 1}" for label, byte in zip(LABELS, digest, strict=False))
        choice = {"message": {"content": grades}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [choice]})
