"""A run that is told to stop finishes its step and saves; told again, it stops at once."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and the two that schedulers send before they take a machine away."""


@contextmanager
def stop_on_signal(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Inside the block the first such signal calls `request_stop(number)`; the second acts as it always does."""
    before = {number: signal.getsignal(number) for number in STOPPING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, _: FrameType | None) -> None:
        restore()
        name = signal.Signals(number).name
        print(f"unirl: {name}: finishing this step, then saving. Once more stops at once", file=sys.stderr)
        request_stop(number)

    for number in STOPPING:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
