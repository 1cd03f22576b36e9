"""Fault injection for tests: damaged media files, and a proxy that spoils a share of the requests.

with FaultProxy("http://127.0.0.1:8000", rate=0.2, seed=0) as proxy:
    RewardClient(proxy.url).score(items)
proxy.counts   # {"drop": 12, "nan": 9, ...}
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from PIL import Image

from unirl.reward.client.wire import ScoreResponse, decode, encode

EXTREMES = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\xff\xff", bytes(4))
"""Values that make a size field extreme."""


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Returns a file with up to 12 random changes: other bytes, extreme sizes, and removed or repeated pieces."""
    body = bytearray(data)
    for _ in range(rng.randint(1, 12)):
        at = rng.randrange(len(body) or 1)
        match rng.randrange(6):
            case 0:
                body[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                body[at : at + 4] = rng.choice(EXTREMES)
            case 2:
                del body[at : at + rng.randrange(64)]
            case 3:
                body[at:at] = body[at : at + rng.randrange(64)]
            case 4:
                body[at : at + 1] = bytes([(body[at] if body else 0) ^ (1 << rng.randrange(8))])
            case 5:
                del body[at + rng.randrange(2000) :]
    return bytes(body)


def media(side: int = 32) -> list[tuple[str, bytes]]:
    """Returns a file of every format that the service reads, each with its modality `image` or `video`."""
    pixels = noise((side, side + 8, 3))
    images: Sequence[tuple[str, dict[str, Any]]] = [
        ("png", {}),
        ("jpeg", {}),
        ("jpeg", {"progressive": True}),
        ("webp", {}),
        ("webp", {"lossless": True}),
    ]
    files = [("image", image_file(pixels, format, **options)) for format, options in images]
    frames = noise((5, side, side + 2, 3))
    return [*files, ("video", video_file(frames)), ("video", video_file(frames, "webm", "libvpx-vp9"))]


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def image_file(pixels: np.ndarray[Any, Any], format: str, **options: Any) -> bytes:
    """Returns uint8 pixels [H, W, 3] as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=format, **options)
    return file.getvalue()


def video_file(frames: np.ndarray[Any, Any], format: str = "mp4", codec: str = "libx264rgb", fps: int = 8) -> bytes:
    """Returns uint8 pixels [F, H, W, 3] as a file. The codec libx264rgb is lossless."""
    import av

    file = io.BytesIO()
    lossless = codec == "libx264rgb"
    with av.open(file, mode="w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps, options={"qp": "0"} if lossless else {})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        for frame in [*(av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in frames), None]:
            container.mux(stream.encode(frame))
    return file.getvalue()


FAULTS = ("drop", "lose", "error", "late_error", "delay", "nan", "truncate", "garble")
"""drop, lose: the connection is closed before or after the service gets the request. error, late_error: a response 500
before or after scoring. delay: a response after the client's timeout. nan: a score is NaN. truncate: the response is
cut off. garble: the body is cut off, and Content-Length agrees with it."""
MAX_HEAD, MAX_BODY = 2**16, 2**27
LIMIT = 2**20


class FaultProxy:
    """Listens on loopback in its own thread and forwards requests one by one."""

    def __init__(
        self, upstream: str, *, rate: float, seed: int, delay_s: float = 5.0, faults: Sequence[str] = FAULTS
    ) -> None:
        """
        Args:
            upstream: the service's URL.
            rate: share of the requests with a fault.
            delay_s: delay of a late response in seconds; a delay above the client's timeout causes a timeout.
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
            # A client that disconnects, or a service that is down, ends the connection.
            with suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Forwards one request. Returns True if the connection stays open."""
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
    """Returns head and body of one HTTP message with a Content-Length. Raises EOFError at the end of the stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(header(head, b"content-length") or 0)
    if len(head) > MAX_HEAD or length > MAX_BODY:
        raise EOFError("larger than the proxy forwards")
    return head, await reader.readexactly(length)


def header(head: bytes, name: bytes) -> bytes | None:
    """Returns the value of a header."""
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def rebuilt(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Returns the head, with a new Content-Length, and the body."""
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([lines[0], b"content-length: %d" % len(body), *lines[1:]]), body


def plain(status: int) -> bytes:
    """Returns the plain response of a proxy."""
    return b"HTTP/1.1 %d Spoiled\r\ncontent-type: text/plain\r\ncontent-length: 7\r\n\r\nspoiled" % status


def with_nan(response: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Returns a score response whose first score is NaN; any other response unchanged."""
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
