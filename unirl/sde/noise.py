"""Noise as a pure function of keys: never the global generator, never a position in a batch.

A draw is named by a key, `r{step}:{id}:{what}` in training and `eval:{id}:{what}` in evaluation; `what` is `x` for
the initial noise and `s{i}` for denoising step i. Its generator is seeded by a hash of the run's seed and the key.
Draws are made on the CPU in float32, so any device, batch, order and chunk gets the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Purpose = Literal["r", "eval"]


def key_seed(seed: int, key: str) -> int:
    """The seed of one draw: 8 bytes of blake2b over "{seed}::{key}", big endian, modulo 2^63."""
    digest = blake2b(f"{seed}::{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63


@dataclass(frozen=True)
class NoiseSource:
    """Every random draw of one step of the loop."""

    seed: int
    """The run's `sampling.seed`, or the evaluation's own."""
    purpose: Purpose
    step: int
    """Step of the loop. Evaluation does not use it: its draws are the same at every step."""

    def __post_init__(self) -> None:
        if self.purpose not in get_args(Purpose):
            raise ValueError(f"NoiseSource.purpose={self.purpose!r} must be one of: {', '.join(get_args(Purpose))}")

    def key(self, id: str, what: str) -> str:
        """The name of one draw."""
        prefix = f"r{self.step}" if self.purpose == "r" else "eval"
        return f"{prefix}:{id}:{what}"

    def normal(self, ids: Sequence[str], what: str, shape: Sequence[int]) -> Float[Tensor, "B *shape"]:
        """[B, *shape] standard normal, float32 on the CPU: row b is a function of ids[b] alone."""
        return self._draw(ids, what, shape, lambda row, generator: row.normal_(generator=generator))

    def uniform(self, ids: Sequence[str], what: str, shape: Sequence[int]) -> Float[Tensor, "B *shape"]:
        """[B, *shape] uniform in [0, 1), float32 on the CPU: row b is a function of ids[b] alone."""
        return self._draw(ids, what, shape, lambda row, generator: row.uniform_(generator=generator))

    def _draw(
        self, ids: Sequence[str], what: str, shape: Sequence[int], fill: Callable[[Tensor, Generator], Tensor]
    ) -> Tensor:
        rows = torch.empty(len(ids), *shape, dtype=torch.float32)
        for id, row in zip(ids, rows, strict=True):
            fill(row, Generator().manual_seed(key_seed(self.seed, self.key(id, what))))
        return rows


class NoiseAhead:
    """The normals of `draws` in order, each drawn in a thread while the one before it is used.

        with NoiseAhead(source, ids, [f"s{i}" for i in sde_indices], shape) as ahead:
            noise = next(ahead)  # == source.normal(ids, "s0", shape), byte for byte

    At most one draw waits. An error in the thread is raised by the `next` that would have returned its draw.
    """

    def __init__(self, source: NoiseSource, ids: Sequence[str], draws: Sequence[str], shape: Sequence[int]) -> None:
        self._source, self._ids, self._shape = source, tuple(ids), tuple(shape)
        self._draws = deque(draws)
        self._pending: Future[Tensor] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise-ahead")

    def __enter__(self) -> NoiseAhead:
        self._submit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pending = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Float[Tensor, "B *shape"]]:
        return self

    def __next__(self) -> Float[Tensor, "B *shape"]:
        """[B, *shape] the next draw. Raises StopIteration after the last."""
        if self._pending is None:
            raise StopIteration
        noise = self._pending.result()
        self._submit()
        return noise

    def _submit(self) -> None:
        """Starts the next draw, if there is one."""
        if self._draws:
            what = self._draws.popleft()
            self._pending = self._thread.submit(self._source.normal, self._ids, what, self._shape)
        else:
            self._pending = None
