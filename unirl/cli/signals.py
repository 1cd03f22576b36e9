"""Stop signals: the first one lets a run finish its step and save; the second one stops it at once."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and the two signals that schedulers send before they end a job."""


@contextmanager
def stop_on_signal(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Inside the block the first stop signal calls `request_stop(number)`; the second has its default effect."""
    before = {number: signal.getsignal(number) for number in STOPPING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, _: FrameType | None) -> None:
        restore()
        name = signal.Signals(number).name
        print(f"unirl: {name}: finishing this step, then saving. A second signal stops at once", file=sys.stderr)
        request_stop(number)

    for number in STOPPING:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
