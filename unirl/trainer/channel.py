"""A bounded queue between two threads of the driver, in which steps of samples travel from the engine to the loop.

What passes is small: heavy rows stay with the workers that made them, and a batch holds references to them.

    channel: Channel[GeneratedStep] = Channel("samples", capacity=2)
    channel.put(step, weight=16)        # waits while the queue is full
    channel.take()                      # waits while the queue is empty; raises the error of a producer that failed
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from unirl.config.errors import InvalidValueError

T = TypeVar("T")


class ChannelClosed(RuntimeError):
    """Nothing more comes, or nothing more is accepted."""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What a channel holds."""

    item: T
    weight: float
    version: int


class Channel(Generic[T]):
    """A queue of any number of producers and consumers. Entries leave it in the order in which they came.

    An entry has a weight, such as its rows or tokens, which counts against the capacity; and a version, such as the
    optimizer updates behind the weights that made it.
    """

    def __init__(self, name: str, capacity: float = math.inf) -> None:
        """
        Args:
            name: for messages.
            capacity: the largest total weight. An entry that is heavier enters an empty channel.

        Raises:
            ConfigError: 2004 if the capacity is not positive.
        """
        if not capacity > 0:
            raise InvalidValueError(f"the capacity of channel {name} must be > 0, got {capacity}")
        self.name, self.capacity = name, capacity
        self._entries: deque[Entry[T]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """The number of entries."""
        with self._changed:
            return len(self._entries)

    @property
    def weight(self) -> float:
        """The total weight of the entries."""
        with self._changed:
            return self._weight()

    def oldest(self) -> int | None:
        """The smallest version of an entry. None if there is no entry."""
        with self._changed:
            return min((entry.version for entry in self._entries), default=None)

    def put(self, item: T, weight: float = 1.0, version: int = 0) -> None:
        """Append an entry, once there is room for it.

        Raises:
            ChannelClosed: the channel is closed, or is closed while this waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(weight))
            if self._is_closed:
                raise ChannelClosed(f"channel {self.name} is closed and takes no further entry")
            self._entries.append(Entry(item, weight, version))
            self._changed.notify_all()

    def take(self) -> T:
        """The first entry, once there is one.

        Raises:
            ChannelClosed: the channel is closed and empty.
            BaseException: the error of `fail`, after the entries that came before it.
        """
        [item] = self.take_batch(0.0)
        return item

    def take_batch(self, weight: float) -> list[T]:
        """The first entries, at least one, until their total weight is at least `weight`. Raises as `take` does."""
        taken: list[T] = []
        total = 0.0
        while not taken or total < weight:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._entries) or self._is_closed)
                if not self._entries:
                    if taken and self._error is None:
                        return taken
                    raise self._reason()
                entry = self._entries.popleft()
                self._changed.notify_all()
            taken.append(entry.item)
            total += entry.weight
        return taken

    def wait_for(self, count: int) -> None:
        """Wait until the channel holds `count` entries, without taking any. Raises as `take` does."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._entries) >= count or self._is_closed)
            if len(self._entries) < count:
                raise self._reason()

    def close(self, discard: bool = False) -> None:
        """Accept no further entry. Entries that are there can be taken, unless they are discarded."""
        with self._changed:
            self._is_closed = True
            if discard:
                self._entries.clear()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Close the channel. Who takes from it gets the entries that are there, and then this error."""
        with self._changed:
            self._error = error
            self._is_closed = True
            self._changed.notify_all()

    def _has_room(self, weight: float) -> bool:
        return not self._entries or self._weight() + weight <= self.capacity

    def _weight(self) -> float:
        return sum(entry.weight for entry in self._entries)

    def _reason(self) -> BaseException:
        return self._error or ChannelClosed(f"channel {self.name} is closed and empty")
