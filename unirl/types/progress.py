"""Progress of the call that runs, so that a slow call is told from one that hangs.

The first import of a module is progress, too: on a cold disk, libraries take minutes to load.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType

SHOWN_COUNTS = 2
"""Counts that a status shows."""


@dataclass
class Counted:
    """How much of a known total is done, such as denoising steps."""

    total: int
    since: float
    """When counting began."""
    at: float
    done: int = 0
    in_all: int = 0
    """Done since counting began: chunk after chunk, the same total is done again."""
    beats: int = 1

    def __str__(self) -> str:
        """`12/20 (3.1/s)`. The first item has no rate: other work came before it."""
        seconds = self.at - self.since
        rate = self.in_all / max(seconds, 1e-9)
        form = ".0f" if rate >= 100 else ".3g"
        return f"{self.done}/{self.total}" + (f" ({rate:{form}}/s)" if seconds > 0 else "")


class Heartbeat:
    """When a worker last made progress, and what it had done."""

    def __init__(self, what: str = "nothing yet") -> None:
        self.what = what
        """The last progress, for those who look for the cause of a hang."""
        self.shown = what
        """The last progress in plain words, for the console."""
        self.count = 0
        """How often in a row it has done this."""
        self.at = time.monotonic()
        self.awaited: Heartbeat | None = None
        """The worker for which this one waits: its progress counts."""
        self.counted: dict[str, Counted] = {}
        """What was counted since the beginning of the call, the latest last."""

    def begin(self, what: str) -> None:
        """Note that `what` begins, and count anew."""
        self.counted = {}
        self.beat(what, shown="started")

    def beat(self, what: str, total: int | None = None, done: int | None = None, shown: str = "") -> None:
        """Note that `what` is done.

        Args:
            shown: the words for it on the console, if they are others than `what`.
            total: how often it will be done in all, if that is known.
            done: how often it is done by now. None: once more than before, and from 1 again when all were done.
        """
        self.count = self.count + 1 if what == self.what else 1
        self.what, self.shown, self.at = what, shown or what, time.monotonic()
        if total is not None:
            self.counted = {name: each for name, each in self.counted.items() if name != what} | {
                what: self._counted(what, total, done)
            }

    def _counted(self, what: str, total: int, done: int | None) -> Counted:
        before = self.counted.get(what)
        if before is None:
            return Counted(total, self.at, self.at, done=1 if done is None else done)
        is_again = before.total != total or before.done >= total or (done is not None and done < before.done)
        now = done if done is not None else 1 if is_again else before.done + 1
        more = now if is_again else now - before.done
        return Counted(total, before.since, self.at, now, before.in_all + more, before.beats + 1)

    def status(self) -> str:
        """The counts that moved last, as text: `sample 8/24 (2.1/s), denoising step 12/20 (3.1/s), 2 s ago`.

        Without any, what was done last. While this one waits for another worker, the status is that worker's.
        """
        awaited = self.awaited
        if awaited is not None:
            return awaited.status()
        latest = list(self.counted.items())[-SHOWN_COUNTS:]
        # The outer count, which has moved less often, stands first.
        latest.sort(key=lambda item: item[1].beats)
        text = ", ".join(f"{what} {count}" for what, count in latest)
        text = text or (f"{self.shown} ({self.count})" if self.count > 1 else self.shown)
        silent = round(self.silent_s)
        return f"{text}, {silent} s ago" if silent else text

    @property
    def silent_s(self) -> float:
        """Seconds without progress."""
        own = time.monotonic() - self.at
        awaited = self.awaited
        return own if awaited is None else min(own, awaited.silent_s)

    @contextmanager
    def waiting_for(self, other: Heartbeat) -> Iterator[None]:
        """Take the progress of another worker for that of this one inside the block."""
        before, self.awaited = self.awaited, other
        try:
            yield
        finally:
            self.awaited = before

    def __str__(self) -> str:
        times = f" (time {self.count})" if self.count > 1 else ""
        return f"last progress {self.silent_s:.3g} s ago: {self.what}{times}"


_HEARTBEAT: ContextVar[Heartbeat | None] = ContextVar("heartbeat", default=None)


def progress(what: str, total: int | None = None, done: int | None = None) -> None:
    """Report that the call that runs has done `what`, such as "denoising step". Does nothing outside of a call.

    Args:
        total, done: as in `Heartbeat.beat`. The console shows them.
    """
    heartbeat = _HEARTBEAT.get()
    if heartbeat is not None:
        heartbeat.beat(what, total, done)


def heartbeat() -> Heartbeat | None:
    """The heartbeat that `progress` reports to."""
    return _HEARTBEAT.get()


class ImportProgress(MetaPathFinder):
    """Reports each module that the call that runs starts to import, and leaves the import to the other finders.

    A name counts once. A call that keeps looking for a module that is not there, or that imports modules again, makes
    no progress.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.outside: Heartbeat | None = None
        """The heartbeat for imports outside of calls, in a process that hosts one worker."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing."""
        if fullname not in self.names:
            self.names.add(fullname)
            target_heartbeat = heartbeat() or self.outside
            if target_heartbeat is not None:
                shown = f"loading Python libraries (module {len(self.names)})"
                target_heartbeat.beat(f"import of {fullname}", shown=shown)


IMPORTS = ImportProgress()


def report_imports(outside: Heartbeat | None = None) -> None:
    """Report imports from now on.

    Args:
        outside: the heartbeat of the only worker of this process. Ray reads the arguments of a call, and imports what
            they name, before the call begins.
    """
    IMPORTS.outside = outside or IMPORTS.outside
    if IMPORTS not in sys.meta_path:
        sys.meta_path.insert(0, IMPORTS)


@contextmanager
def reporting_to(target: Heartbeat) -> Iterator[None]:
    """Let `progress` report to `target` inside the block."""
    report_imports()
    token = _HEARTBEAT.set(target)
    try:
        yield
    finally:
        _HEARTBEAT.reset(token)
