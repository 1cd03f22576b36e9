"""Step caching: a deterministic step reuses the blocks of an earlier one in rows whose input has hardly changed.

A first-block cache, after TeaCache (arXiv:2411.19108) and ParaAttention. Let a_i be the tokens after the first block at
step i, z_i those after the last one, and j the last step at which a row was computed:

    z_i = a_i + (z_j - a_j)    if  sum |a_i - a_j| < threshold * sum |a_j|
          last blocks of a_i   otherwise

Each row decides for itself, so its bits do not depend on the other rows of its batch. The blocks after the first one
are left out if all rows of a forward reuse theirs. The host then waits for the device once per forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OutputLayout:
    """The form in which a block returns its streams of tokens, such as those of the image and of the text."""

    is_bare: bool
    """One tensor instead of a tuple. After blocks with several streams, it has their tokens one after the other."""
    present: tuple[bool, ...]
    """False for a stream that the block leaves out, as the last one of some networks does."""

    @classmethod
    def of(cls, output: object) -> OutputLayout:
        """The layout of the output of a block."""
        bare = isinstance(output, Tensor)
        return cls(bare, (True,) if bare else tuple(part is not None for part in _parts(output)))

    def select(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """The streams [B, L, D] of the first block, as far as this layout has them."""
        if self.is_bare and len(streams) > 1:
            return [torch.cat(list(streams), dim=1)]
        return [stream for stream, present in zip(streams, self.present, strict=True) if present]

    def output(self, streams: Sequence[Tensor]) -> Any:
        """The streams in the form of the block's output."""
        if self.is_bare:
            return streams[0]
        rest = iter(streams)
        return tuple(next(rest) if present else None for present in self.present)


def _parts(output: object) -> Sequence[Tensor | None]:
    assert isinstance(output, tuple | list), f"a block returned a {type(output).__name__}"
    return output


def tensors_of(output: object) -> list[Tensor]:
    """The streams of a block's output."""
    return [output] if isinstance(output, Tensor) else [part for part in _parts(output) if part is not None]


def changes(streams: Sequence[Tensor], before: Sequence[Tensor], threshold: float) -> Tensor:
    """[B] bool, True in rows whose streams changed by less than the fraction `threshold`."""
    change = sum((new.float() - old.float()).abs().flatten(1).sum(1) for new, old in zip(streams, before, strict=True))
    size = sum(old.float().abs().flatten(1).sum(1) for old in before)
    return torch.as_tensor(change < threshold * size)


def where(rows: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """`left` in the rows [B] that are True, `right` in the others."""
    return [torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(left, right, strict=True)]


@dataclass
class Forward:
    """What one forward pass of a step leaves for the same pass of the next step."""

    first: list[Tensor] | None = None
    """[B, L, D] streams after the first block, of the step at which each row was computed."""
    residual: list[Tensor] = field(default_factory=list)
    """Streams after the last block minus those after the first, of the same step."""
    streams: list[Tensor] = field(default_factory=list)
    """Streams after the first block in the current step."""
    reused: Tensor | None = None
    """[B] bool, the rows that reuse their residual in the current step. None if none does."""
    is_skipped: bool = False
    """All rows reuse their residual."""


class BlockChain:
    """The blocks of one network, in the order in which a forward calls them."""

    def __init__(self, blocks: Sequence[nn.Module], threshold: float) -> None:
        self.blocks = blocks
        self.threshold = threshold
        self.layouts: dict[int, OutputLayout] = {}
        self.forwards: list[Forward] = []
        """One for each forward of a step: guidance in two passes makes two."""
        self.pass_number = -1
        self.may_reuse = False
        self.calls = 0
        self.skipped = 0

    def begin_step(self, may_reuse: bool) -> None:
        """Begin a denoising step."""
        self.pass_number = -1
        self.may_reuse = may_reuse

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put the cache around the forward of each block for the duration of the context."""
        before = [vars(block).get("forward") for block in self.blocks]
        for number, block in enumerate(self.blocks):
            vars(block)["forward"] = partial(
                self._first if number == 0 else partial(self._later, number), block.forward
            )
        try:
            yield
        finally:
            for block, own in zip(self.blocks, before, strict=True):
                if own is None:
                    del vars(block)["forward"]
                else:
                    vars(block)["forward"] = own

    def _first(self, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """The first block, which always runs. It begins a forward pass, and decides which rows reuse their residual."""
        output = forward(*inputs, **named)
        self.calls += 1
        self.pass_number += 1
        if self.pass_number == len(self.forwards):
            self.forwards.append(Forward())
        current = self.forwards[self.pass_number]
        current.streams = [stream.detach() for stream in tensors_of(output)]
        current.reused, current.is_skipped = None, False
        if self.may_reuse and current.first is not None:
            current.reused = changes(current.streams, current.first, self.threshold)
            current.is_skipped = bool(current.reused.all())
        return output

    def _later(self, number: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """A block after the first, whose output is passed by if all rows reuse their residual."""
        current = self.forwards[self.pass_number]
        is_last = number == len(self.blocks) - 1
        self.calls += 1
        if current.is_skipped:
            self.skipped += 1
            layout = self.layouts[number]
            streams = layout.select(current.streams)
            if is_last:
                streams = [a + residual for a, residual in zip(streams, current.residual, strict=True)]
            return layout.output(streams)
        output = forward(*inputs, **named)
        self.layouts[number] = OutputLayout.of(output)
        return self._finish(current, output, self.layouts[number]) if is_last else output

    def _finish(self, current: Forward, output: Any, layout: OutputLayout) -> Any:
        """The output of the last block: the cached one in rows that reuse it. Remembers the other rows."""
        begin = layout.select(current.streams)
        end = [stream.detach() for stream in tensors_of(output)]
        residual = [z - a for z, a in zip(end, begin, strict=True)]
        if current.reused is None or current.first is None:
            current.first, current.residual = current.streams, residual
            return output
        cached = [a + kept for a, kept in zip(begin, current.residual, strict=True)]
        current.first = where(current.reused, current.first, current.streams)
        current.residual = where(current.reused, current.residual, residual)
        return layout.output(where(current.reused, cached, end))


class StepCache:
    """The cache of one sampling run. Without chains it does nothing."""

    def __init__(self, chains: Sequence[BlockChain] = ()) -> None:
        self.chains = chains

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put the cache around the blocks for the duration of the context."""
        with ExitStack() as stack:
            for chain in self.chains:
                stack.enter_context(chain.attached())
            yield

    def begin_step(self, may_reuse: bool) -> None:
        """Begin a denoising step. If it may not reuse anything, it computes all blocks and fills the cache."""
        for chain in self.chains:
            chain.begin_step(may_reuse)

    def skipped_share(self) -> float | None:
        """The share of all calls of blocks that were left out. None without a cache."""
        if not self.chains:
            return None
        return sum(chain.skipped for chain in self.chains) / max(sum(chain.calls for chain in self.chains), 1)
