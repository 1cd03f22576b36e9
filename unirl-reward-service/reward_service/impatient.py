"""HTTP connections that are closed when their headers do not come."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def impatient(header_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, which has no such limit, closing a connection `header_s` after it began to wait for headers.

    Their size is bounded by h11 (64 KiB).
    """

    class Impatient(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._unwatch()
            elif self._late is None:
                self._late = self.loop.call_later(header_s, self.transport.close)

        def _unwatch(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Impatient
