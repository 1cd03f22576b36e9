"""Compares the checksums that SGLang reports about its weights with the tensors that were sent.

The checksum of a tensor on a CPU is the beginning of its SHA-256, which is computed here, too. On a GPU it is a hash of
SGLang's own. Then equal tensors must have equal checksums, and other tensors other ones: this also finds a server that
keeps old weights under a new name. Joined layers count when all of their parts were sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import SyncError
from unirl.distributed.weight_sync.fingerprint import Fingerprint, PendingFingerprints
from unirl.rollout.engine.serving.names import server_part
from unirl.rollout.engine.serving.payloads import bytes_of

DIGITS = 16
"""Hexadecimal digits of a checksum."""
VOCABULARY = ("embed_tokens", "lm_head")
"""The layers with a row per token."""
ROWS_MULTIPLE = 64
"""The server appends rows of zeros to these layers, up to a multiple of this number."""
Parts = tuple[Fingerprint, ...]


@dataclass
class SentTensors:
    """The tensors of one transfer, by their names at the server."""

    hashes_bytes: bool
    """Compute SHA-256, for a server on a CPU."""
    fingerprints: PendingFingerprints = field(default_factory=PendingFingerprints)
    parts: dict[str, dict[int, str]] = field(default_factory=dict)
    """Tensor of the server to the names of its parts by number."""
    num_parts: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, Any] = field(default_factory=dict)
    """Tensor of the server to the SHA-256 of its parts so far, as long as they come in order."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Note a tensor of the checkpoint that is sent."""
        place = server_part(name)
        self.fingerprints.add(name, tensor)
        known = self.parts.setdefault(place.name, {})
        if self.hashes_bytes and place.part == len(known):
            self.hashes.setdefault(place.name, hashlib.sha256()).update(bytes_of(padded(name, tensor)))
        known[place.part] = name
        self.num_parts[place.name] = place.num_parts

    def whole(self) -> dict[str, Parts]:
        """Tensors of the server whose parts were all sent, to the fingerprints of the parts in order."""
        prints = self.fingerprints.result()
        return {
            name: tuple(prints[parts[number]] for number in sorted(parts))
            for name, parts in self.parts.items()
            if len(parts) == self.num_parts[name]
        }


def padded(name: str, tensor: Tensor) -> Tensor:
    """A tensor of the checkpoint with the rows of zeros that the server appends to it."""
    if name.split(".")[-2] not in VOCABULARY:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % ROWS_MULTIPLE))


@dataclass
class ChecksumProof:
    """What is known about the checksums of a server, over several transfers."""

    server: str
    """The server's name in error messages."""
    seen: dict[str, tuple[Parts, Sequence[str]]] = field(default_factory=dict)
    """Tensor of the server to its parts after the last transfer, and to its checksum at every rank."""

    def check(self, sent: SentTensors, ranks: Sequence[Mapping[str, str]]) -> int:
        """The number of tensors that were compared. Raises SyncError for a tensor whose checksum contradicts it."""
        compared = 0
        for name, parts in sent.whole().items():
            if not all(name in rank for rank in ranks):
                continue
            now = tuple(rank[name] for rank in ranks)
            compared += 1
            self._compare(name, sent, parts, now)
            self.seen[name] = parts, now
        return compared

    def _compare(self, name: str, sent: SentTensors, parts: Parts, now: Sequence[str]) -> None:
        if sent.hashes_bytes and len(now) == 1 and name in sent.hashes:
            expected = sent.hashes[name].hexdigest()[:DIGITS]
            if now[0] != expected:
                raise SyncError(
                    f"{name!r} did not arrive as it was sent: {self.server} reports the checksum {now[0]}, and that of "
                    f"the sent bytes is {expected}. It keeps old weights, or stores them in another dtype"
                )
        if name not in self.seen:
            return
        former, before = self.seen[name]
        if former != parts and before == now:
            raise SyncError(
                f"{name!r} was sent with new values, and {self.server} reports the checksum of the old ones "
                f"({', '.join(now)}): it still computes with them, under the name of the new ones"
            )
        if former == parts and before != now:
            raise SyncError(
                f"{name!r} was sent with the same values as before, and {self.server} reports another checksum "
                f"({', '.join(now)} after {', '.join(before)}): something else changed its weights"
            )
