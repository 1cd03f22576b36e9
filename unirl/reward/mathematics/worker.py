"""The process that runs math-verify, as a script: it reads one JSON object per line and writes one.

The comparison of expressions that a policy wrote may take unbounded time or memory. In a process of its own, it can be
stopped.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, TextIO

MEMORY = 2 << 30
"""Largest address space in bytes. An expression that needs more raises MemoryError here."""

LONGEST = 200
"""Largest number of characters of an answer that is returned."""


def main() -> None:
    deadline_s = float(sys.argv[1])
    answers = own_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.WARNING)
    judge("1", r"\boxed{1}")
    say(answers, {"ready": True})
    for line in sys.stdin:
        # The owner may have died. The default action of this alarm ends the process, also inside foreign code.
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        say(answers, reply_to(json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def own_stdout() -> TextIO:
    """Returns a stream to standard output, and redirects everything that libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def reply_to(question: dict[str, str | None]) -> dict[str, Any]:
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
