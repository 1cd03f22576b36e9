"""Output that a command can lose: a closed terminal or a pipe whose reader ended must not end a run."""

from __future__ import annotations

import errno
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from unirl.types.secrets import redact

READER_GONE = (errno.EPIPE, errno.EIO)
"""The errors of writing into a pipe that nobody reads, and to a terminal that was closed."""


class LosableStream:
    """A stream to write to, which loses what is written when nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        with may_lose(self.stream):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with may_lose(self.stream):
            self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextmanager
def may_lose(stream: TextIO) -> Iterator[None]:
    """Within the block, a stream that nobody reads any more is pointed at the null device. What was written is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in READER_GONE:
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """Point a stream at the null device, so that neither later output nor the end of Python fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def inert(text: str) -> str:
    """`text` in which no character acts on a terminal: what is not printable is spelled out, such as `<U+009B>`.

    Those are the control characters C0 and C1, and the marks that turn or hide text (Unicode bidirectional controls).
    """
    return "".join(
        c if c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs" else f"<U+{ord(c):04X}>" for c in text
    )


def print_inert(text: str, end: str = "\n", flush: bool = False) -> None:
    """Print text that contains names, prompts or values of others to standard output."""
    print(inert(text), end=end, flush=flush)


def say(text: str, end: str = "\n") -> None:
    """Print a line to standard error, if there is still somebody who reads it."""
    with may_lose(sys.stderr):
        print(redact(text), end=end, file=sys.stderr, flush=True)
