"""A semaphore that counts bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MemoryBudget:
    """Lets threads hold up to `capacity` bytes together. One that needs more than that holds all of it, alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Waits until `num_bytes` are free, and holds them."""
        share = min(num_bytes, self.capacity)
        with self._changed:
            self._changed.wait_for(lambda: self.held + share <= self.capacity)
            self.held += share
        try:
            yield
        finally:
            with self._changed:
                self.held -= share
                self._changed.notify_all()
