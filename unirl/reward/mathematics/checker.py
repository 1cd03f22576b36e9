"""Whether two answers are the same mathematics, asked of math-verify in a process with a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from unirl.config.errors import RewardError

Verdict = Literal["right", "wrong", "undecided"]
START_S = 120.0
"""Deadline for a process to import its libraries."""
PATIENCE = 4.0
"""The process ends itself after so many deadlines, should nobody be left to end it."""

SHOWN = 2000
"""Bytes of what a process said last, in which its last line is looked for."""


@dataclass(frozen=True)
class Comparison:
    """What math-verify makes of a response."""

    verdict: Verdict
    said: str = ""
    """The answer that it read, without white space; "" = none, or none that it could handle."""


class MathChecker:
    """One process that is started on first use, lives on, and is killed and started again when it does not answer."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._noise: IO[bytes] | None = None
        self._read = b""

    def judge(self, reference: str, response: str) -> Comparison:
        """Whether the response has the reference's answer; `undecided` when that takes too long or too much memory.

        Raises:
            RewardError: 6002 when the reference cannot be read, or the process fails.
        """
        return self._ask(reference, response) or self._undecided()

    def check_reference(self, reference: str) -> None:
        """Raises RewardError when the reference is no mathematics that can be read."""
        found = self._ask(reference, None)
        if found is None or found.verdict != "right":
            raise RewardError(f"the right answer {reference!r} takes too long to be read as mathematics. Simplify it")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _undecided(self) -> Comparison:
        """After a deadline has passed: it was the response, if an easy question is answered in time."""
        easy = self._ask("1", r"\boxed{1}")
        if easy is None or easy.verdict != "right":
            self.close()
            raise RewardError(
                f"math-verify does not say within {self.deadline_s:g} s that 1 is 1: this machine is too busy. Give it "
                "more time (config.timeout_s), or fewer processes"
            )
        return Comparison("undecided")

    def _ask(self, reference: str, response: str | None) -> Comparison | None:
        """What it found; None when the deadline passed, after which the process is gone."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"reference": reference, "response": response}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        reply = self._reply(self.deadline_s)
        if reply is None:
            self.close()
            return None
        if reply["verdict"] == "unreadable":
            raise RewardError(
                f"the right answer {reference!r} is no mathematics in LaTeX. Write it like \\frac{{1}}{{2}}"
            )
        return Comparison(reply["verdict"], reply["said"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            script = str(Path(__file__).with_name("worker.py"))
            self._noise, self._read = tempfile.TemporaryFile(), b""  # noqa: SIM115 - lives as long as the process
            self._process = subprocess.Popen(
                # -P: the folder of the script is not searched for modules.
                [sys.executable, "-P", script, str(PATIENCE * self.deadline_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._noise,
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
            self._finalizer = weakref.finalize(self, _end, self._process, self._noise)
            if self._reply(START_S) is None:
                self.close()
                raise RewardError(f"the process of math-verify did not start within {START_S:g} s")
        return self._process

    def _reply(self, seconds: float) -> Any:
        """The next line of the process as JSON, None when there is none in time. Raises RewardError when it died."""
        assert self._process is not None and self._process.stdout is not None
        pipe, until = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            found = os.read(pipe, 1 << 16)
            if not found:
                raise self._died()
            self._read += found
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def _died(self) -> RewardError:
        assert self._process is not None and self._noise is not None
        status = self._process.wait()
        self._noise.seek(max(0, self._noise.seek(0, os.SEEK_END) - SHOWN))
        last = self._noise.read(SHOWN).decode(errors="replace").strip().rpartition("\n")[2]
        self.close()
        return RewardError(f"the process of math-verify ended (status {status}): {last or 'it said nothing'}")


def _end(process: subprocess.Popen[bytes], noise: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, noise):
        assert pipe is not None
        with suppress(BrokenPipeError):  # a question that was never read
            pipe.close()
