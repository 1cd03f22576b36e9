"""The process in which math-verify works: one JSON object per line in, one out. It is run as a script.

Comparing expressions that a policy wrote may take forever or all memory; here that ends this process and nothing else.
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
"""Bytes of address space: what grows without end is a MemoryError here, not a machine that swaps."""

LONGEST = 200
"""Characters of an answer that are given back."""


def main() -> None:
    deadline_s = float(sys.argv[1])
    answers = own_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.WARNING)
    judge("1", r"\boxed{1}")
    say(answers, {"ready": True})
    for line in sys.stdin:
        # Nobody may be left to kill this process; the default action of the alarm ends it, in foreign code as well.
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        say(answers, reply_to(json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def own_stdout() -> TextIO:
    """Where answers go; what libraries print goes to the standard error output from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def reply_to(question: dict[str, str | None]) -> dict[str, Any]:
    """`{"verdict": "right" | "wrong" | "undecided" | "unreadable", "said": answer of the response}`.

    What may be unreadable is the reference.
    """
    try:
        verdict, said = judge(str(question["reference"]), question["response"])
        return {"verdict": verdict, "said": said}
    except (MemoryError, RecursionError):
        return {"verdict": "undecided", "said": ""}


def judge(reference: str, response: str | None) -> tuple[str, str]:
    """The verdict, and the answer that was read. Without a response: whether the reference can be read."""
    from math_verify import parse, verify

    wanted = parse(as_boxed(reference), parsing_timeout=None)
    if not wanted:
        return "unreadable", ""
    if response is None:
        return "right", ""
    found = parse(response, parsing_timeout=None)
    said = "".join(str(found[-1]).split())[:LONGEST] if found else ""  # the last entry is the text that was read
    return "right" if verify(wanted, found, timeout_seconds=None) else "wrong", said


def as_boxed(reference: str) -> str:
    """A reference answer in the form that is read without guessing."""
    plain = reference.strip()
    if plain.startswith("$") and plain.endswith("$"):
        plain = plain.strip("$")
    return plain if r"\boxed" in plain else rf"\boxed{{{plain}}}"


if __name__ == "__main__":
    main()
