"""Stop signals: what the first and the second one do, before a run begins and while it trains.

before the first step   the first ends the command with status 75 (Ctrl-C: 130), and everything is cleaned up
while it trains         the first lets the run finish its step and save; the status is the same
at any time             the second ends this process at once; so does the end of the grace period after the first
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType, TracebackType

from unirl.config.errors import StoppedAtStart
from unirl.config.failures import Session
from unirl.tracking.streams import say

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, the two signals that schedulers send before they end a job, and that of a terminal that is closed."""
SHOW_CURSOR = "\x1b[?25h"
"""Shows the cursor of a terminal, which a live display hides."""
END_OF_WATCH = b"\0"


@contextmanager
def stoppable_start(session: Session) -> Iterator[None]:
    """Inside the block the first SIGTERM, SIGUSR1 or SIGHUP raises StoppedAtStart, outside of a `stop_on_signal`.

    Ctrl-C raises KeyboardInterrupt, as always in Python. SIGHUP stays ignored if it was, as by nohup. Only the main
    thread of a process can have handlers, so elsewhere the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        _let_the_second_end()
        raise StoppedAtStart(signal.Signals(number).name)

    with _restored_handlers(), GracePeriod(session):
        for number in STOPPING[1:]:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, stop)
        yield


@contextmanager
def stop_on_signal(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Inside the block the first stop signal calls `request_stop(number)`; the second ends this process at once.

    After the second signal nothing is cleaned up. What was saved stays valid, and workers end with this process.

    The shell and the kernel may both send SIGHUP when a terminal is closed, so it never counts as the second. It stays
    ignored if it was, as by nohup.
    """

    def stop(number: int, _: FrameType | None) -> None:
        _let_the_second_end()
        request_stop(number)
        say(f"unirl: {signal.Signals(number).name}: finishing this step, then saving. A second signal stops at once")

    with _restored_handlers():
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, stop)
        yield


class GracePeriod:
    """Ends this process with status 75 if it has not ended `session.grace_s` seconds after a stop signal.

    Python writes the number of each signal into a pipe when it arrives, also while the main thread is in a call of a
    native library and runs no handler. A thread reads it there.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        _keep_forks_silent()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over.set()
        signal.set_wakeup_fd(self._before)
        os.write(self._write, END_OF_WATCH)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        while (number := os.read(self._read, 1)) != END_OF_WATCH:
            if number[0] in STOPPING:
                if not self._is_over.wait(self.session.grace_s):
                    status = 130 if number[0] == signal.SIGINT else 75
                    _end(status, f"{_name(number[0])}: not ended within {self.session.grace_s:g} s; stopped at once")
                return


@cache
def _keep_forks_silent() -> None:
    """Let no forked process write its own signals into the pipe of this one."""

    def forget() -> None:
        with suppress(ValueError):  # not in the main interpreter
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


def _let_the_second_end() -> None:
    """From now on a stop signal ends this process at once."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else _stop_at_once)


def _stop_at_once(number: int, _: FrameType | None) -> None:
    _end(128 + number, f"{_name(number)}: stopped at once, without saving")


def _end(status: int, text: str) -> None:
    # Past sys.stderr, which a live display replaces, and whose lock another thread may hold.
    cursor = SHOW_CURSOR if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{cursor}unirl: {text}\n".encode())
    os._exit(status)


def _name(number: int) -> str:
    return signal.Signals(number).name


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """The handlers of stop signals are the same after the block as before it."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
