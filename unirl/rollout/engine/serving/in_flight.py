"""A transfer of weights while a server answers requests: what happens to them, and to those that come meanwhile.

    drain   The transfer waits for the answers, whose tokens are all from the former weights.
    abort   The server breaks the requests off. They are asked again after the transfer, with the same seeds, so that
            all of their tokens are from the new weights.
    pause   They stop between two tokens, and go on after the transfer: the first tokens of an answer are from the
            former weights, and the others from the new ones.

In all three, requests that come during a transfer wait for its end. No request is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from unirl.config.errors import SyncError
from unirl.config.http import RequestFailed

InFlight = Literal["drain", "abort", "pause"]
WAIT_S = 1800.0
"""Seconds that requests wait for a transfer, or a transfer for requests."""


class InterruptedByTransfer(Exception):
    """A transfer of weights broke off an attempt. The request is asked again after it."""


class Gate:
    """Lets attempts at requests through, except during a transfer of weights."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self.num_running = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context of one attempt. It begins when no transfer is under way.

        Raises:
            InterruptedByTransfer: the attempt failed, and a transfer is under way.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: not self.is_closed, WAIT_S):
                raise SyncError(f"a request waited {WAIT_S:g} s for the end of a transfer of weights, which never came")
            self.num_running += 1
        try:
            yield
        except RequestFailed as error:
            if self.is_closed:
                raise InterruptedByTransfer from error
            raise
        finally:
            with self.changed:
                self.num_running -= 1
                self.changed.notify_all()

    def close(self) -> None:
        """Begin a transfer: attempts wait from now on."""
        with self.changed:
            self.is_closed = True

    def wait_idle(self) -> None:
        """Wait until no attempt runs. Raises SyncError if that takes too long."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.num_running == 0, WAIT_S):
                raise SyncError(
                    f"a transfer of weights waited {WAIT_S:g} s for {self.num_running} answers. Set "
                    "rollout.in_flight=abort if the engine has it, or rollout.timeout_s to less"
                )

    def open(self) -> None:
        """End a transfer."""
        with self.changed:
            self.is_closed = False
            self.changed.notify_all()
