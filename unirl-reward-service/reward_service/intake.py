"""From the bytes of a connection to a parsed request: every byte is charged when it arrives, and none blocks others."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from prometheus_client import Gauge
from starlette.requests import Request

from reward_service.config import MIB, LimitsConfig
from reward_service.fairness import FairSlots
from reward_service.scoring import ReceivedSample, RequestRefused, digest_of
from unirl.reward.client.wire import JSON, NO_METADATA, ReceivedRequest, decode, read_metadata

INLINE_BYTES = 2**18
"""A body of at most this size is parsed at once, in at most some 50 ms. A larger one is parsed in a thread."""
PIECE_BYTES = 2**20
"""A gzip body is unpacked, and charged, in pieces of at most this size."""
UNPACKERS, PARSERS = 2, 1
"""Number of requests that are unpacked, and parsed, at the same time. Parsing holds Python's lock (GIL)."""
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
        self.used = 0
        gauge.set_function(lambda: self.used)
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
        self._unpackers, self._parsers = FairSlots(UNPACKERS), FairSlots(PARSERS)

    async def receive(self, request: Request, content_type: str, share: MemoryShare) -> list[ReceivedSample]:
        """Returns the samples of a request, whose memory is charged to `share`.

        Raises:
            RequestRefused: 400 the body is cut off or damaged, 408 it came too slowly, 413 it is too large,
                415 its encoding is not supported, 422 it does not have the form of the wire, 503 no memory at present.
        """
        body = await self._read(request, content_type, share)
        if body.length <= INLINE_BYTES:
            parsed = parse(body.content, content_type)
        else:
            async with self._parsers.slot(share.client):
                parsed = await asyncio.to_thread(parse, body.content, content_type)
        share.give(body.length)
        share.take(parsed.extra_bytes)
        return parsed.samples

    async def _read(self, request: Request, content_type: str, share: MemoryShare) -> Body:
        """Returns the unpacked body."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise RequestRefused(415, "unsupported_type", f"content-encoding {encoding!r}: send gzip or none")
        self._check_declared(request.headers.get("content-length"))
        unpacker = Unpacker(self._unpackers, share.client) if encoding == "gzip" else None
        body, pace, more = Body(self._limits, content_type, share), Pace(self._limits), True
        while more:
            piece, more = await pace.next(request)
            if unpacker is None:
                body.add(piece)
                continue
            async for plain in unpacker.unpack(piece):
                body.add(plain)
        if unpacker is not None:
            unpacker.check_end()
        return body

    def _check_declared(self, declared: str | None) -> None:
        """Raises RequestRefused (413) at once when more is declared than may come."""
        limit = self._limits.body_bytes
        if declared is None or not declared.isdecimal():
            return
        if len(declared) > len(str(limit)) or int(declared) > limit:  # int() refuses thousands of digits
            raise too_large(self._limits)


class Body:
    """An unpacked body, which is charged piece by piece: its bytes, and what will be parsed from them."""

    def __init__(self, limits: LimitsConfig, content_type: str, share: MemoryShare) -> None:
        self._limits, self._share = limits, share
        self._is_json, self._values = content_type == JSON, 0
        self.content: bytes | bytearray = b""

    @property
    def length(self) -> int:
        return len(self.content)

    def add(self, piece: bytes) -> None:
        """Raises RequestRefused: 413 the body is too large, 503 no memory at present."""
        if self.length + len(piece) > self._limits.body_bytes:
            raise too_large(self._limits)
        values = json_values(piece) if self._is_json else 0
        self._values += values
        if self._values > MAX_JSON_VALUES:
            raise RequestRefused(413, "too_large", f"the body has more than {MAX_JSON_VALUES} values: send fewer items")
        self._share.take(2 * len(piece) + values * JSON_VALUE_BYTES)
        if not self.content:
            self.content = piece
            return
        if isinstance(self.content, bytes):
            self.content = bytearray(self.content)
        self.content += piece


class Unpacker:
    """Unpacks a gzip body in a thread, in pieces."""

    def __init__(self, slots: FairSlots, client: str) -> None:
        self._slots, self._client = slots, client
        self._gzip = zlib.decompressobj(wbits=31)

    async def unpack(self, piece: bytes) -> AsyncIterator[bytes]:
        """Yields the content of the next piece of the body. Raises RequestRefused (400)."""
        while piece:
            if self._gzip.eof:
                raise RequestRefused(400, "malformed", "the body goes on after the end of its gzip content")
            try:
                async with self._slots.slot(self._client):
                    plain = await asyncio.to_thread(self._gzip.decompress, piece, PIECE_BYTES)
            except zlib.error as error:
                raise RequestRefused(400, "malformed", f"not gzip: {error}") from error
            yield plain
            piece = self._gzip.unused_data if self._gzip.eof else self._gzip.unconsumed_tail

    def check_end(self) -> None:
        """Raises RequestRefused (400) unless the body is complete."""
        if not self._gzip.eof:
            raise RequestRefused(400, "malformed", "the gzip body ends too early")


class Pace:
    """The time that a client has taken for its body. Time in which the service works does not count."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._waited, self._received = 0.0, 0

    async def next(self, request: Request) -> tuple[bytes, bool]:
        """Returns the next piece of a body, and True if there may be more.

        Raises:
            RequestRefused: 408 the client took longer than `body_s`, or was slower than `body_rate_kb` after the first
                `header_s` seconds; 400 it closed the connection.
        """
        limits, loop = self._limits, asyncio.get_running_loop()
        allowed = min(limits.body_s, limits.header_s + self._received / (limits.body_rate_kb * 1024))
        begun = loop.time()
        try:
            async with asyncio.timeout_at(begun + allowed - self._waited):
                message = await request.receive()
        except TimeoutError as error:
            raise RequestRefused(
                408,
                "too_slow",
                f"{self._received} bytes of the body came in {self._waited + loop.time() - begun:.1f} s: it must come "
                f"within {limits.body_s:g} s, and faster than {limits.body_rate_kb:g} KiB/s",
            ) from error
        if message["type"] == "http.disconnect":
            raise RequestRefused(400, "malformed", "the body ended before its length")
        self._waited += loop.time() - begun
        self._received += len(message["body"])
        return message["body"], message.get("more_body", False)


def too_large(limits: LimitsConfig) -> RequestRefused:
    return RequestRefused(413, "too_large", f"the body is larger than {limits.body_mb:g} MiB: send fewer items at once")


def json_values(piece: bytes) -> int:
    """Returns an upper bound of the number of values that begin in a piece of a JSON body, the first one left out."""
    return sum(piece.count(mark) for mark in (b",", b"[", b"{"))


def parse(body: bytes | bytearray, content_type: str) -> Parsed:
    """Returns the samples in a body. Raises RequestRefused: 400 it is not a message, 422 it has another form."""
    try:
        request = decode(ReceivedRequest, body, content_type)
        samples = []
        for index, item in enumerate(request.requests):
            if item.metadata is not NO_METADATA:
                metadata = read_metadata(item.metadata, content_type, f"$.requests[{index}].metadata")
                # The received bytes of the metadata would keep the whole body in memory.
                item = msgspec.structs.replace(item, metadata=msgspec.Raw(msgspec.msgpack.encode(metadata)))
            samples.append(ReceivedSample(item, digest_of(item)))
    except msgspec.ValidationError as error:
        raise RequestRefused(422, "schema", str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestRefused(400, "malformed", str(error)) from error
    # Python stores a text that is not ASCII with up to four bytes per character.
    texts = (text for each in samples for turn in each.item.history for text in turn.texts if not text.isascii())
    return Parsed(samples, sum(4 * len(text) for text in texts))
