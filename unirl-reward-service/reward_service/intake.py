"""From the bytes of a connection to a parsed request: every byte is charged when it arrives, and none blocks others."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from prometheus_client import Gauge
from starlette.requests import ClientDisconnect, Request

from reward_service.config import MIB, LimitsConfig
from reward_service.fairness import FairSlots
from reward_service.scoring import ReceivedSample, RequestRefused, digest_of
from unirl.reward.client.wire import JSON, ReceivedRequest, decode, read_metadata

INLINE_BYTES = 2**14
"""A body of at most this size is parsed at once, in about a millisecond. A larger one is parsed in a thread."""
PIECE_BYTES = 2**20
"""A gzip body is unpacked, and charged, in pieces of at most this size."""
PARSERS = 2
"""Number of requests that are unpacked or parsed at the same time."""
MAX_JSON_VALUES = 2**20
"""Largest number of commas and opening brackets in a JSON body, each of which may begin another object in memory."""
JSON_VALUE_BYTES = 80
"""Memory that is charged for each of them."""
SMALL_BYTES = 2**20
RESERVED = 1 / 8
"""Requests of at most SMALL_BYTES may use all memory, larger ones leave this share of it free."""


class MemoryBudget:
    """The memory that all requests together may hold: their bodies, what is parsed from them, and decoded files.

    The large requests of one client may hold `client_share` of it, and those of all clients leave some for small ones.
    """

    def __init__(self, limits: LimitsConfig, gauge: Gauge) -> None:
        self.limit = int(limits.pending_mb * MIB)
        self._large = int((1 - RESERVED) * self.limit)
        self.per_client = min(self._large, int(limits.client_share * self.limit))
        self._gauge = gauge
        self.used = 0
        self._clients: dict[str, int] = {}

    @contextmanager
    def share(self, client: str) -> Iterator[MemoryShare]:
        """Opens the share of one request. Its memory is released at the end of the block."""
        share = MemoryShare(self, client)
        try:
            yield share
        finally:
            share.give(share.held)

    def has_room(self, client: str, held: int, count: int) -> bool:
        """Returns True if a request that holds `held` bytes may hold `count` more at present."""
        if held + count <= SMALL_BYTES:
            return self.used + count <= self.limit
        return self.used + count <= self._large and self._clients.get(client, 0) + count <= self.per_client

    def add(self, client: str, count: int) -> None:
        self.used += count
        self._gauge.set(self.used)
        held = self._clients.get(client, 0) + count
        if held:
            self._clients[client] = held
        else:
            self._clients.pop(client, None)


class MemoryShare:
    """The memory of one request of one client."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget, self.client = budget, client
        self.held = 0

    def take(self, count: int) -> None:
        """Reserves `count` more bytes. Raises RequestRefused: 413 too many for one request, 503 too many at present."""
        if self.held + count > self._budget.per_client:
            limit_mb = self._budget.per_client / MIB
            raise RequestRefused(
                413, "too_large", f"the decoded request has more than {limit_mb:g} MiB: send fewer items at once"
            )
        if not self._budget.has_room(self.client, self.held, count):
            used = self._budget.used / MIB
            raise RequestRefused(503, "busy", f"requests with {used:.0f} MiB are in progress", 1)
        self.held += count
        self._budget.add(self.client, count)

    def give(self, count: int) -> None:
        """Releases `count` bytes."""
        self.held -= count
        self._budget.add(self.client, -count)


@dataclass(frozen=True)
class Parsed:
    """The samples of a body, and the memory that they hold beyond the size of the body."""

    samples: list[ReceivedSample]
    extra_bytes: int


class Intake:
    """Reads the bodies of requests."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._parsers = FairSlots(PARSERS)

    async def receive(self, request: Request, content_type: str, share: MemoryShare) -> list[ReceivedSample]:
        """Returns the samples of a request, whose memory is charged to `share`.

        Raises:
            RequestRefused: 400 the body is cut off or damaged, 408 it came too slowly, 413 it is too large,
                415 its encoding is not supported, 422 it does not have the form of the wire, 503 no memory at present.
        """
        body = await self._read(request, share)
        values = json_values(body) if content_type == JSON else 0
        charged = len(body) + values * JSON_VALUE_BYTES
        share.take(charged)
        if len(body) <= INLINE_BYTES:
            parsed = parse(body, content_type)
        else:
            async with self._parsers.slot(share.client):
                parsed = await asyncio.to_thread(parse, body, content_type)
        share.give(len(body))
        share.take(parsed.extra_bytes)
        return parsed.samples

    async def _read(self, request: Request, share: MemoryShare) -> bytearray:
        """Returns the unpacked body."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise RequestRefused(415, "unsupported_type", f"content-encoding {encoding!r}: send gzip or none")
        self._check_declared(request.headers.get("content-length"))
        pieces = paced(request.stream(), self._limits)
        body = bytearray()
        async for piece in self._unpacked(pieces, share.client) if encoding == "gzip" else pieces:
            if len(body) + len(piece) > self._limits.body_bytes:
                raise too_large(self._limits)
            share.take(len(piece))
            body += piece
        return body

    def _check_declared(self, declared: str | None) -> None:
        """Raises RequestRefused (413) at once when more is declared than may come."""
        limit = self._limits.body_bytes
        if declared is None or not declared.isdecimal():
            return
        if len(declared) > len(str(limit)) or int(declared) > limit:  # int() refuses thousands of digits
            raise too_large(self._limits)

    async def _unpacked(self, pieces: AsyncIterator[bytes], client: str) -> AsyncIterator[bytes]:
        """Yields the content of a gzip body in pieces. Raises RequestRefused (400)."""
        unpacker = zlib.decompressobj(wbits=31)
        async for piece in pieces:
            while piece:
                if unpacker.eof:
                    raise RequestRefused(400, "malformed", "the body goes on after the end of its gzip content")
                try:
                    async with self._parsers.slot(client):
                        plain = await asyncio.to_thread(unpacker.decompress, piece, PIECE_BYTES)
                except zlib.error as error:
                    raise RequestRefused(400, "malformed", f"not gzip: {error}") from error
                yield plain
                piece = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        if not unpacker.eof:
            raise RequestRefused(400, "malformed", "the gzip body ends too early")


async def paced(pieces: AsyncIterator[bytes], limits: LimitsConfig) -> AsyncIterator[bytes]:
    """Yields the pieces of a body.

    Raises:
        RequestRefused: 408 the client took longer than `body_s`, or was slower than `body_rate_kb` after the first
            `header_s` seconds; 400 it closed the connection. Time in which the service works does not count.
    """
    loop = asyncio.get_running_loop()
    waited, received = 0.0, 0
    while True:
        allowed = min(limits.body_s, limits.header_s + received / (limits.body_rate_kb * 1024))
        begun = loop.time()
        try:
            async with asyncio.timeout_at(begun + allowed - waited):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise RequestRefused(
                408,
                "too_slow",
                f"{received} bytes of the body came in {waited + loop.time() - begun:.1f} s: it must come within "
                f"{limits.body_s:g} s, and faster than {limits.body_rate_kb:g} KiB/s",
            ) from error
        except ClientDisconnect as error:
            raise RequestRefused(400, "malformed", "the body ended before its length") from error
        if piece is None:
            return
        waited += loop.time() - begun
        received += len(piece)
        yield piece


def too_large(limits: LimitsConfig) -> RequestRefused:
    return RequestRefused(413, "too_large", f"the body is larger than {limits.body_mb:g} MiB: send fewer items at once")


def json_values(body: bytearray) -> int:
    """Returns an upper bound of the number of values in a JSON body. Raises RequestRefused (413)."""
    count = 1 + sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if count > MAX_JSON_VALUES:
        raise RequestRefused(413, "too_large", f"the body has more than {MAX_JSON_VALUES} values: send fewer items")
    return count


def parse(body: bytearray, content_type: str) -> Parsed:
    """Returns the samples in a body. Raises RequestRefused: 400 it is not a message, 422 it has another form."""
    try:
        request = decode(ReceivedRequest, body, content_type)
        samples = []
        for index, item in enumerate(request.requests):
            metadata = read_metadata(item.metadata, content_type, f"$.requests[{index}].metadata")
            packed = msgspec.Raw(msgspec.msgpack.encode(metadata))
            # The received bytes of the metadata would keep the whole body in memory.
            item = msgspec.structs.replace(item, metadata=packed)
            samples.append(ReceivedSample(item, digest_of(item)))
    except msgspec.ValidationError as error:
        raise RequestRefused(422, "schema", str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestRefused(400, "malformed", str(error)) from error
    # Python stores a text that is not ASCII with up to four bytes per character.
    texts = (text for each in samples for turn in each.item.history for text in turn.texts if not text.isascii())
    return Parsed(samples, sum(4 * len(text) for text in texts))
