"""Progress of the call that runs, so that a slow call is told from one that hangs.

The first import of a module is progress, too: on a cold disk, libraries take minutes to load.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from types import ModuleType


class Heartbeat:
    """When a worker last made progress, and what it had done."""

    def __init__(self, what: str = "nothing yet") -> None:
        self.what = what
        self.count = 0
        """How often in a row it has done this."""
        self.at = time.monotonic()
        self.awaited: Heartbeat | None = None
        """The worker for which this one waits: its progress counts."""

    def beat(self, what: str) -> None:
        """Note that `what` is done."""
        self.count = self.count + 1 if what == self.what else 1
        self.what, self.at = what, time.monotonic()

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


def progress(what: str) -> None:
    """Report that the call that runs has done `what`, such as "denoising step". Does nothing outside of a call."""
    heartbeat = _HEARTBEAT.get()
    if heartbeat is not None:
        heartbeat.beat(what)


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
                target_heartbeat.beat(f"import of {fullname}")


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
