"""Typed messages between the service and its child processes: 8 bytes of length, then msgpack.

Loads neither torch nor an image library: the process that decodes media imports it too.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from unirl.reward.client.wire import ItemError, MediaPayload, TextAnswer

LENGTH = 8
MAX_FRAME = 2**32


class PeerGone(ConnectionError):
    """The other side of a connection is gone."""


class DecodeMedia(Struct, tag=True):
    """Asks a decoder for raw pixels; one of the three is given."""

    modality: str
    medium: MediaPayload | None = None
    base64: str | None = None
    path: str | None = None


class DecodedMedia(Struct, tag=True):
    """Raw pixels, or why there are none."""

    medium: MediaPayload | None = None
    problem: str | None = None


class LoadScorer(Struct, tag=True):
    """Asks a worker for its scorer."""

    reward: str
    scorer: str
    params: dict[str, Any]
    plugins: list[str]
    toy: bool
    needs_cuda: bool


class ScorerLoaded(Struct, tag=True):
    """The scorer is loaded, and which columns it reads."""

    reads: list[str]


class ScorerNotLoaded(Struct, tag=True):
    """The scorer cannot be loaded: a UniRLError's message, code and exit status."""

    message: str
    code: int
    exit_status: int


class ScorerRow(Struct):
    """One item as its scorer needs it; media are raw."""

    id: str
    prompt: str | None = None
    text: str | None = None
    image: MediaPayload | None = None
    video: MediaPayload | None = None
    metadata: dict[str, Any] | None = None
    sources: list[MediaPayload] = []
    """The pictures of the turns before: what was edited."""


class ScoreBatch(Struct, tag=True):
    """Asks a worker for scores."""

    rows: list[ScorerRow]


@dataclass(frozen=True)
class ItemScores:
    """What one reward makes of one item."""

    parts: dict[str, float]
    """`total` comes first."""
    said: TextAnswer | None = None


ItemOutcome = ItemScores | ItemError
"""ItemScores, or why there are none."""


class BatchOutcomes(Struct, tag=True):
    """One outcome per row."""

    outcomes: list[ItemOutcome]


Message = DecodeMedia | DecodedMedia | LoadScorer | ScorerLoaded | ScorerNotLoaded | ScoreBatch | BatchOutcomes

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> list[bytes]:
    """The buffers to send, in order."""
    body = _encoder.encode(message)
    return [len(body).to_bytes(LENGTH, "big"), body]


def unpack(body: bytes | bytearray) -> Message:
    """The message of a frame. Raises msgspec.DecodeError."""
    message: Message = _decoder.decode(body)
    return message


def frame_length(head: bytes | bytearray) -> int:
    """How many bytes follow. Raises PeerGone when no frame is that long."""
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME:
        raise PeerGone(f"a frame of {length} bytes: at most {MAX_FRAME} are sent")
    return length


class Channel:
    """The child's side: blocking, one message at a time."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def receive(self) -> Message:
        """The next message. Raises PeerGone when the service is gone."""
        return unpack(self._read(frame_length(self._read(LENGTH))))

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            received = self._socket.recv_into(view[done:])
            if not received:
                raise PeerGone("the service is gone")
            done += received
        return buffer

    def send(self, message: Message) -> None:
        for buffer in pack(message):
            self._socket.sendall(buffer)


def end_with_parent() -> None:
    """End this process as soon as its standard input closes, which the service holds open, whatever it is doing."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
