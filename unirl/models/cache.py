"""A cache that is bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class BoundedCache(Generic[KeyT, ValueT]):
    """A thread-safe cache. The least recently used entries are evicted once the others exceed the capacity."""

    def __init__(self, num_bytes: Callable[[ValueT], int]) -> None:
        self.num_bytes = num_bytes
        self.entries: OrderedDict[KeyT, ValueT] = OrderedDict()
        self.size = 0
        """Bytes of all entries."""
        self._lock = threading.Lock()

    def get(self, key: KeyT) -> ValueT | None:
        """The entry, which is now the most recently used one, or None."""
        with self._lock:
            if key in self.entries:
                self.entries.move_to_end(key)
            return self.entries.get(key)

    def put(self, key: KeyT, value: ValueT, capacity: int) -> None:
        """Add an entry, and evict others until all entries together have at most `capacity` bytes."""
        with self._lock:
            if key in self.entries:
                self.size -= self.num_bytes(self.entries.pop(key))
            self.entries[key] = value
            self.size += self.num_bytes(value)
            while self.size > capacity:
                self.size -= self.num_bytes(self.entries.popitem(last=False)[1])

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self.entries.clear()
            self.size = 0
