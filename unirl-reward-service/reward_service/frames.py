"""Typed messages between the service and its child processes: 8 bytes of length, then msgpack.

This module loads neither torch nor an image library, since the decoder process imports it.
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
    """The process at the other end of a connection has ended."""


class DecodeMedia(Struct, tag=True):
    """Requests raw pixels from a decoder. Exactly one of `medium`, `base64` and `path` is set."""

    modality: str
    medium: MediaPayload | None = None
    base64: str | None = None
    path: str | None = None


class DecodedMedia(Struct, tag=True):
    """The raw pixels, or the reason why there are none."""

    medium: MediaPayload | None = None
    error: str | None = None


class LoadScorer(Struct, tag=True):
    """Requests that a worker loads its scorer."""

    reward: str
    scorer: str
    params: dict[str, Any]
    plugins: list[str]
    toy: bool
    needs_cuda: bool


class ScorerLoaded(Struct, tag=True):
    """The scorer is loaded; `reads` are its columns."""

    reads: list[str]


class ScorerNotLoaded(Struct, tag=True):
    """The scorer cannot be loaded. The fields are those of a UniRLError."""

    message: str
    code: int
    exit_status: int


class ScorerRow(Struct):
    """One item as its scorer needs it, with raw media."""

    id: str
    prompt: str | None = None
    text: str | None = None
    image: MediaPayload | None = None
    video: MediaPayload | None = None
    metadata: Any = None
    """A mapping or None. The service has it as msgspec.Raw, since only the worker unpacks it."""
    sources: list[MediaPayload] = []
    """The images of earlier turns: the sources of an edited image."""


class ScoreBatch(Struct, tag=True):
    """Requests scores from a worker."""

    rows: list[ScorerRow]


@dataclass(frozen=True)
class ItemScores:
    """The scores of one item by one reward."""

    parts: dict[str, float]
    """The part `total` comes first."""
    answer: TextAnswer | None = None


ItemOutcome = ItemScores | ItemError
"""The scores, or the reason why there are none."""


class BatchOutcomes(Struct, tag=True):
    """One outcome per row of a batch."""

    outcomes: list[ItemOutcome]


Message = DecodeMedia | DecodedMedia | LoadScorer | ScorerLoaded | ScorerNotLoaded | ScoreBatch | BatchOutcomes

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> list[bytes]:
    """Returns the buffers to send, in order."""
    body = _encoder.encode(message)
    return [len(body).to_bytes(LENGTH, "big"), body]


def unpack(body: bytes | bytearray) -> Message:
    """Returns the message in a frame. Raises msgspec.DecodeError."""
    message: Message = _decoder.decode(body)
    return message


def frame_length(head: bytes | bytearray) -> int:
    """Returns the number of bytes that follow. Raises PeerGone when it exceeds the largest frame."""
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME:
        raise PeerGone(f"a frame has {length} bytes, and the limit is {MAX_FRAME}")
    return length


class Channel:
    """The child's end of the socket: blocking, one message at a time."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def receive(self) -> Message:
        """Returns the next message. Raises PeerGone when the service has ended."""
        return unpack(self._read(frame_length(self._read(LENGTH))))

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            received = self._socket.recv_into(view[done:])
            if not received:
                raise PeerGone("the service has ended")
            done += received
        return buffer

    def send(self, message: Message) -> None:
        for buffer in pack(message):
            self._socket.sendall(buffer)


def end_with_parent() -> None:
    """Ends this process, whatever it is doing, as soon as its standard input closes. The service holds it open."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
