"""The judge of toy scale: an OpenAI-compatible endpoint whose replies have the right form and no meaning."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import httpx2

WORDS: Sequence[str] = (
    "yes", "no", "one", "two", "three", "four", "five", "six",
    "black", "blue", "brown", "green", "orange", "pink", "purple", "red", "white", "yellow",
)  # fmt: skip
LABELS: Sequence[str] = (
    "Consistency", "Realism", "Aesthetic Quality", "Alignment Score", "Coherence Score", "Style Score",
)  # fmt: skip


def toy_transport() -> httpx2.MockTransport:
    """Returns a transport that answers requests in this process by a hash of the image and the question."""
    import httpx2

    def answer(request: httpx2.Request) -> httpx2.Response:
        question = msgspec.json.decode(request.content)
        alternatives = bool(question.get("logprobs"))
        return httpx2.Response(200, content=completion(question["messages"][0]["content"], alternatives))

    return httpx2.MockTransport(answer)


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
