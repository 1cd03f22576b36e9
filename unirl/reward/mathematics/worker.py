"""The process that runs math-verify, as a script: it answers one JSON object after the other on a pipe.

The comparison of expressions that a policy wrote may take unbounded time or memory. In a process of its own, it can be
stopped.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection

MEMORY = 2 << 30
"""Largest address space in bytes. An expression that needs more raises MemoryError here."""

LONGEST = 200
"""Largest number of characters of an answer that is returned."""


def main() -> None:
    owner, deadline_s = Connection(int(sys.argv[1])), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.WARNING)
    judge("1", r"\boxed{1}")
    owner.send_bytes(b"ready")
    while True:
        try:
            question = json.loads(owner.recv_bytes())
        except EOFError:
            return
        # The owner may have died. The default action of this alarm ends the process, also inside foreign code.
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        owner.send_bytes(json.dumps(reply_to(question)).encode())
        signal.setitimer(signal.ITIMER_REAL, 0)


def reply_to(question: dict[str, str | None]) -> dict[str, str]:
    """Returns `{"verdict": "right" | "wrong" | "undecided" | "unreadable", "answer": answer of the response}`.

    `unreadable` refers to the reference.
    """
    try:
        verdict, answer = judge(str(question["reference"]), question["response"])
        return {"verdict": verdict, "answer": answer}
    except (MemoryError, RecursionError):
        return {"verdict": "undecided", "answer": ""}


def judge(reference: str, response: str | None) -> tuple[str, str]:
    """Returns the verdict and the answer of the response. Without a response, checks that the reference is readable."""
    from math_verify import parse, verify

    expected = parse(as_boxed(reference), parsing_timeout=None)
    if not expected:
        return "unreadable", ""
    if response is None:
        return "right", ""
    parsed = parse(response, parsing_timeout=None)
    answer = "".join(str(parsed[-1]).split())[:LONGEST] if parsed else ""  # the last entry is the text that was read
    return "right" if verify(expected, parsed, timeout_seconds=None) else "wrong", answer


def as_boxed(reference: str) -> str:
    r"""Returns a reference answer within \boxed{}, which math-verify parses without guessing."""
    plain = reference.strip()
    if plain.startswith("$") and plain.endswith("$"):
        plain = plain.strip("$")
    return plain if r"\boxed" in plain else rf"\boxed{{{plain}}}"


if __name__ == "__main__":
    main()
