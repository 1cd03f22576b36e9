"""What a command is loading, for commands that take seconds before their first line."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unirl.config.failures import Session
from unirl.tracking.streams import say
from unirl.types.progress import Heartbeat, reporting_to

SLOW = ("train", "quickstart")
"""The commands that import the libraries of models and then load a model."""
IMPORTS = ("sample", "eval", "export", "fit", "bench")
"""The commands whose modules take seconds to import. They show by themselves what they do then."""
PERIOD_S = 1.0
ERASE = "\r\x1b[2K"


class Shown:
    """The status that a command shows, which blocks can replace while they run."""

    def __init__(self, status: Callable[[], str]) -> None:
        self.status = status

    @contextmanager
    def watching(self, status: Callable[[], str]) -> Iterator[None]:
        """Within the block, says `status()`."""
        before, self.status = self.status, status
        try:
            yield
        finally:
            self.status = before


@contextmanager
def shown_start(session: Session, what: str = "starting") -> Iterator[Shown]:
    """Within the block, says every second what is done, until `session.start`, which comes before a banner.

    Args:
        what: the first word of the lines.
    """
    beat = Heartbeat("started")
    shown = Shown(beat.status)
    has_started, rewrites = session.has_started, sys.stderr.isatty()

    def watch() -> None:
        while not has_started.wait(PERIOD_S):
            line = f"unirl: {what}: {shown.status()}"
            say(f"{ERASE}{line[:79]}" if rewrites else line, end="" if rewrites else "\n")
        if rewrites:
            say(ERASE, end="")

    thread = threading.Thread(target=watch, name="start-progress", daemon=True)
    thread.start()
    session.on_start = thread.join
    try:
        with reporting_to(beat):
            yield shown
    finally:
        session.start()
