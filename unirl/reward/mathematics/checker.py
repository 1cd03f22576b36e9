"""Compares two answers as mathematics, by math-verify in a process with a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Literal

from unirl.config.errors import RewardError

Verdict = Literal["right", "wrong", "undecided"]
START_S = 120.0
"""Deadline for a process to import its libraries."""
PATIENCE = 4.0
"""The process ends itself after this many deadlines, in case its owner has died."""

SHOWN = 2000
"""Number of bytes at the end of the process's error output that are searched for its last line."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a response with a right answer."""

    verdict: Verdict
    answer: str = ""
    """The answer that was read in the response, without white space; "" if there is none or it cannot be evaluated."""


class MathChecker:
    """A process that starts on first use, is killed when it is late, and starts again on the next use."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, reference: str, response: str) -> Comparison:
        """Compares a response with a reference. The verdict is `undecided` when that takes too much time or memory.

        Raises:
            RewardError: 6002 when the reference cannot be read, the process fails, or an easy question is late as well.
        """
        comparison = self._ask(reference, response)
        if comparison is not None:
            return comparison
        easy = self._ask("1", r"\boxed{1}")
        if easy is None or easy.verdict != "right":
            self.close()
            raise RewardError(
                f"math-verify does not say within {self.deadline_s:g} s that 1 is 1: this machine is too busy. Give it "
                "more time (config.timeout_s), or fewer processes"
            )
        return Comparison("undecided")

    def check_reference(self, reference: str) -> None:
        """Raises RewardError when the reference cannot be read as mathematics."""
        comparison = self._ask(reference, None)
        if comparison is None or comparison.verdict != "right":
            raise RewardError(f"the right answer {reference!r} takes too long to be read as mathematics. Simplify it")

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _ask(self, reference: str, response: str | None) -> Comparison | None:
        """Returns the result, or None when the deadline has passed. The process is then killed."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send_bytes(json.dumps({"reference": reference, "response": response}).encode())
        except OSError:
            raise self._died() from None
        reply = self._receive(self.deadline_s)
        if reply is None:
            self.close()
            return None
        answer = json.loads(reply)
        if answer["verdict"] == "unreadable":
            raise RewardError(
                f"the right answer {reference!r} is not mathematics in LaTeX. Write it like \\frac{{1}}{{2}}"
            )
        return Comparison(**answer)

    def _start(self) -> None:
        script = str(Path(__file__).with_name("worker.py"))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P excludes the folder of the script from the module search path.
                [sys.executable, "-P", script, str(theirs.fileno()), str(PATIENCE * self.deadline_s)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C and a closed terminal are for the run, which finishes its step.
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe, self._stderr)
        if self._receive(START_S) is None:
            self.close()
            raise RewardError(f"the process of math-verify did not start within {START_S:g} s")

    def _receive(self, seconds: float) -> bytes | None:
        """Returns the next message of the process; None if none comes in time. Raises RewardError if it died."""
        try:
            return self._pipe.recv_bytes() if self._pipe.poll(seconds) else None
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> RewardError:
        assert self._process is not None
        status = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - SHOWN))
        last = self._stderr.read(SHOWN).decode(errors="replace").strip().rpartition("\n")[2]
        self.close()
        return RewardError(f"the process of math-verify ended (status {status}): {last or 'it wrote no error'}")


def _end(process: subprocess.Popen[bytes], pipe: Connection, stderr: IO[bytes]) -> None:
    process.kill()
    process.wait()
    pipe.close()
    stderr.close()
