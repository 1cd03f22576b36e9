"""A proxy that spoils a share of what passes, to show what a client makes of it.

with FaultProxy("http://127.0.0.1:8000", rate=0.2, seed=0) as proxy:
    RewardClient(proxy.url).score(items)
proxy.counts   # {"drop": 12, "nan": 9, ...}
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from unirl.reward.client.wire import ScoreResponse, decode, encode

FAULTS = ("drop", "lose", "error", "late_error", "delay", "nan", "truncate", "garble")
"""Closed before the service sees the request, or after; a 500 before, or after; an answer later than the client waits,
with NaN, cut off on the way, or cut off where HTTP does not tell."""
MAX_HEAD, MAX_BODY = 2**16, 2**27
LIMIT = 2**20


class FaultProxy:
    """Listens on loopback in a thread of its own, and passes requests on one by one."""

    def __init__(
        self, upstream: str, *, rate: float, seed: int, delay_s: float = 5.0, faults: Sequence[str] = FAULTS
    ) -> None:
        """
        Args:
            upstream: the service's URL.
            rate: share of the requests that are spoiled.
            delay_s: how long an answer is held back; longer than the client waits, it is a time-out.
        """
        self.rate, self.counts = rate, Counter[str]()
        self._address = urlsplit(upstream)
        self._random, self._delay_s, self._faults = random.Random(seed), delay_s, tuple(faults)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        self._server = server
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=LIMIT)

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # A client that goes away, or a service that is down, ends the connection.
            with suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on; whether the connection stays open."""
        request = await message(reader)
        fault = self._random.choice(self._faults) if self._random.random() < self.rate else "none"
        self.counts[fault] += 1
        if fault == "drop":
            return False
        if fault == "error":
            return await _send(writer, plain(500))
        response = await self._forward(request)
        if fault == "lose":
            return False
        if fault == "late_error":
            return await _send(writer, plain(500))
        if fault == "delay":
            await asyncio.sleep(self._delay_s)
        if fault == "nan":
            response = with_nan(response)
        if fault == "garble":
            response = rebuilt(response[0], response[1][: len(response[1]) // 2])
        head, body = response
        if fault == "truncate":
            await _send(writer, head + body[: len(body) // 2])
            return False
        return await _send(writer, head + body)

    async def _forward(self, request: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port, limit=LIMIT)
        try:
            writer.writelines(request)
            await writer.drain()
            return await message(reader)
        finally:
            writer.close()


async def message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one HTTP message that says its length. Raises EOFError at the end of the stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(header(head, b"content-length") or 0)
    if len(head) > MAX_HEAD or length > MAX_BODY:
        raise EOFError("larger than the proxy passes on")
    return head, await reader.readexactly(length)


def header(head: bytes, name: bytes) -> bytes | None:
    """The value of a header."""
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def rebuilt(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """The same head over another body."""
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([lines[0], b"content-length: %d" % len(body), *lines[1:]]), body


def plain(status: int) -> bytes:
    """An answer of a machine in between."""
    return b"HTTP/1.1 %d Spoiled\r\ncontent-type: text/plain\r\ncontent-length: 7\r\n\r\nspoiled" % status


def with_nan(response: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """A score response whose first score is not a number; any other response as it is."""
    head, body = response
    content_type = (header(head, b"content-type") or b"").decode()
    try:
        scores = decode(ScoreResponse, body, content_type)
    except msgspec.DecodeError:
        return response
    for parts in (parts for result in scores.results for parts in result.values()):
        parts[next(iter(parts))] = math.nan
        break
    return rebuilt(head, encode(scores, content_type))


async def _send(writer: asyncio.StreamWriter, data: bytes) -> bool:
    writer.write(data)
    await writer.drain()
    return True
