"""A fair order among clients: a queue that serves them in turn, and slots that they get in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """The waiting entries of several clients. `pop` serves the clients in turn, and each client in its own order."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, deque[T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def count(self, client: str) -> int:
        """Returns the number of entries of a client."""
        return len(self._entries.get(client, ()))

    def push(self, client: str, entry: T) -> None:
        self._entries.setdefault(client, deque()).append(entry)
        self._length += 1

    def push_first(self, client: str, entry: T) -> None:
        """Adds an entry that is the next one to be served."""
        self._entries.setdefault(client, deque()).appendleft(entry)
        self._entries.move_to_end(client, last=False)
        self._length += 1

    def first(self) -> T:
        """Returns the entry that `pop` would return. The queue must not be empty."""
        return next(iter(self._entries.values()))[0]

    def pop(self) -> T:
        """Removes and returns the next entry. The queue must not be empty."""
        client, entries = next(iter(self._entries.items()))
        entry = entries.popleft()
        self._length -= 1
        if entries:
            self._entries.move_to_end(client)
        else:
            del self._entries[client]
        return entry

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Removes and returns all entries for which `unwanted` is true."""
        removed: list[T] = []
        for client, entries in list(self._entries.items()):
            removed += [entry for entry in entries if unwanted(entry)]
            self._entries[client] = deque(entry for entry in entries if not unwanted(entry))
            if not self._entries[client]:
                del self._entries[client]
        self._length -= len(removed)
        return removed


class FairSlots:
    """A number of slots. Clients that wait get free slots in turn, however many requests each of them has."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Holds one slot inside the block."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(client)
        try:
            yield
        finally:
            self._release()

    async def _turn(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was given in the same moment
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():  # a cancelled request waits no longer
                turn.set_result(None)
                return
        self._free += 1
