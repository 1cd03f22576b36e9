"""A 64-bit fingerprint of a tensor's bytes and their positions, computed on the tensor's device.

    digest = sum_i  M(w_i + (i + 1) K1)  mod 2^64,     M(z) = K3 (z' xor z' >> 32),  z' = K2 (z xor z >> 29)

over the tensor's bytes as little-endian 64-bit words w_i (zeros fill the last one). M is a bijection, so any change of
one word changes the digest. Positions enter before the mixing, so exchanging two words changes it, too. Two different
contents have the same digest with probability 2^-64. It detects errors, not attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

K1, K2, K3 = (k - 2**64 for k in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64's, signed
CPU_WORDS, ACCELERATOR_WORDS = 1 << 16, 1 << 22
"""Words per step: as many as fit in a CPU's cache, or keep a GPU busy."""


@dataclass(frozen=True)
class Fingerprint:
    """Equal if shape, dtype and every bit are. Other bits give another fingerprint, except with probability 2^-64."""

    shape: tuple[int, ...]
    dtype: str
    digest: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {self.digest & (2**64 - 1):016x}"


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The fingerprint of one tensor."""
    return fingerprints([("", tensor)])[""]


def fingerprints(named: Iterable[tuple[str, Tensor]]) -> dict[str, Fingerprint]:
    """Fingerprints by name, with one transfer from the device."""
    pending = PendingFingerprints()
    for name, tensor in named:
        pending.add(name, tensor)
    return pending.result()


class PendingFingerprints:
    """Fingerprints whose digests are still on the device, so that one transfer reads them all."""

    def __init__(self) -> None:
        self.finish: dict[str, Callable[[int], Fingerprint]] = {}
        self.digests: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Compute the digest of `tensor`. Its values may change afterwards."""
        self.finish[name] = partial(Fingerprint, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self.digests.append(digest(tensor))

    def result(self) -> dict[str, Fingerprint]:
        """All fingerprints, by name."""
        values = torch.stack(self.digests).tolist() if self.digests else []
        return {name: finish(value) for (name, finish), value in zip(self.finish.items(), values, strict=True)}


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """[] int64 on the tensor's device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    size = chunk_words(tensor.device)
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8
    words = raw[: whole * 8].view(torch.int64)
    for start in range(0, whole, size):
        total += _mixed(words[start : start + size], start)
    if raw.numel() % 8:
        rest = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        rest[: raw.numel() % 8] = raw[whole * 8 :]
        total += _mixed(rest.view(torch.int64), whole)
    return total


def chunk_words(device: torch.device) -> int:
    """The number of words that are mixed in one step on a device."""
    return CPU_WORDS if device.type == "cpu" else ACCELERATOR_WORDS


def _mixed(words: Tensor, start: int) -> Tensor:
    """The sum of M over words at the positions `start`, start + 1, ..."""
    z = _positions(chunk_words(words.device), words.device)[: len(words)] + words
    z.add_((start * K1 + 2**63) % 2**64 - 2**63)  # start K1 mod 2^64 as a signed number
    shifted = torch.bitwise_right_shift(z, 29).bitwise_and_((1 << 35) - 1)
    z.bitwise_xor_(shifted).mul_(K2)
    torch.bitwise_right_shift(z, 32, out=shifted).bitwise_and_((1 << 32) - 1)
    return z.bitwise_xor_(shifted).mul_(K3).sum()


@lru_cache(maxsize=8)
def _positions(count: int, device: torch.device) -> Tensor:
    """[count] (i + 1) K1."""
    return torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(K1)
