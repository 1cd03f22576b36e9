"""The HTTP protocol of one connection: deadlines for its headers and its reading, and a quota of each client."""

from __future__ import annotations

import asyncio
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from reward_service.config import LimitsConfig

BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 57\r\n\r\n"
    b'{"kind":"busy","detail":"this client has no connections"}'
)


def limited_protocol(limits: LimitsConfig) -> type[H11Protocol]:
    """Returns uvicorn's HTTP protocol with limits. h11 limits the size of headers to 64 KiB.

    A connection is closed if its client takes longer than `header_s` for the headers of a request, or does not read a
    response for `body_s`. A client with more than its share of the connections is answered 503.
    """
    connections: Counter[str] = Counter()
    quota = max(1, int(limits.client_share * limits.connections))

    class LimitedProtocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _address = ""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._address = self.client[0] if self.client else ""
            connections[self._address] += 1
            if connections[self._address] > quota:
                transport.write(BUSY)
                transport.close()
            self._watch()

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            connections[self._address] -= 1
            if not connections[self._address]:
                del connections[self._address]
            self._unwatch()
            self.resume_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            self._unread = self.loop.call_later(limits.body_s, self.transport.abort)
            super().pause_writing()

        def resume_writing(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None
            super().resume_writing()

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._unwatch()
            elif self._late is None:
                self._late = self.loop.call_later(limits.header_s, self.transport.close)

        def _unwatch(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return LimitedProtocol
