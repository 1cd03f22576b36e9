"""Noise as a pure function of keys. It depends neither on the global generator nor on the position in a batch.

The key of a draw is `r{step}:{id}:{what}` in training and `eval:{id}:{what}` in evaluation, where `what` is `x` for
the initial noise and `s{i}` for denoising step i. A hash of the run's seed and the key seeds the generator of the draw.
Draws are made on the CPU in float32, so they have the same bits for any device, batch, order and chunk size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Purpose = Literal["r", "eval"]


def key_seed(seed: int, key: str) -> int:
    """The seed of one draw: 8 bytes of blake2b over "{seed}::{key}", big endian, modulo 2^63."""
    digest = blake2b(f"{seed}::{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63


@dataclass(frozen=True)
class NoiseSource:
    """The random draws of one step of the loop."""

    seed: int
    """`sampling.seed`, or `evaluation.seed` in evaluation."""
    purpose: Purpose
    step: int
    """Step of the loop. Evaluation ignores it: its draws are the same at every step."""

    def __post_init__(self) -> None:
        if self.purpose not in get_args(Purpose):
            raise ValueError(f"NoiseSource.purpose={self.purpose!r} must be one of: {', '.join(get_args(Purpose))}")

    def key(self, id: str, what: str) -> str:
        """The key of one draw."""
        prefix = f"r{self.step}" if self.purpose == "r" else "eval"
        return f"{prefix}:{id}:{what}"

    def normal(self, ids: Sequence[str], what: str, shape: Sequence[int]) -> Float[Tensor, "B *shape"]:
        """Standard normal numbers, float32 on the CPU. Row b depends on ids[b] alone."""
        return self._draw(ids, what, shape, lambda row, generator: row.normal_(generator=generator))

    def uniform(self, ids: Sequence[str], what: str, shape: Sequence[int]) -> Float[Tensor, "B *shape"]:
        """Uniform numbers in [0, 1), float32 on the CPU. Row b depends on ids[b] alone."""
        return self._draw(ids, what, shape, lambda row, generator: row.uniform_(generator=generator))

    def _draw(
        self, ids: Sequence[str], what: str, shape: Sequence[int], fill: Callable[[Tensor, torch.Generator], Tensor]
    ) -> Tensor:
        rows = torch.empty(len(ids), *shape, dtype=torch.float32)
        for id, row in zip(ids, rows, strict=True):
            fill(row, torch.Generator().manual_seed(key_seed(self.seed, self.key(id, what))))
        return rows


@contextmanager
def noise_ahead(
    source: NoiseSource, ids: Sequence[str], draws: Sequence[str], shape: Sequence[int]
) -> Iterator[Iterator[Float[Tensor, "B *shape"]]]:
    """Iterator over the normal draws `draws`. A thread computes each one while the caller uses the one before.

        with noise_ahead(source, ids, [f"s{i}" for i in sde_indices], shape) as ahead:
            noise = next(ahead)  # == source.normal(ids, "s0", shape), byte for byte

    At most one draw is computed ahead. An error in the thread is raised by the `next` that would return its draw.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise-ahead") as thread:
        started = (thread.submit(source.normal, ids, what, shape) for what in draws)  # starts a draw when it is asked

        def iterate(pending: Future[Tensor] | None) -> Generator[Tensor]:
            while pending is not None:
                noise = pending.result()
                pending = next(started, None)
                yield noise

        with closing(iterate(next(started, None))) as ahead:
            yield ahead
