"""Sampling with sharded weights: the blocks of a module are gathered one at a time, in the same order on every rank.

A gather is a collective, so all ranks take part in it. But ranks sample different rows: they run different numbers of
forwards, and some forwards leave out blocks. Therefore every forward gathers every block, in the order of the first
forward, and a rank without further forwards gathers along until no rank has any:

    rank 0   forward   forward   forward   forward   end
    rank 1   forward   forward   gathers   gathers   end
             '-- announced by an all-reduce of one number on the host: 1 = a forward, 0 = nothing left to do

The values of a forward are those of gathered weights. Only the moment at which a weight is gathered differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from unirl.config.errors import IncompatibleError
from unirl.distributed import RankInfo
from unirl.types.progress import progress

if TYPE_CHECKING:  # this import takes seconds
    from torch.distributed.fsdp import FSDPModule

UNITS = Mapping[nn.Module, Sequence["FSDPModule"]]
"""Block to what FSDP2 gathers for it, the block itself first."""


class Lockstep:
    """Makes the forwards of one module gather its blocks in step with those of the other ranks."""

    def __init__(self, root: nn.Module, units: UNITS, prefetched: int, rank: RankInfo) -> None:
        """
        Args:
            prefetched: number of blocks that are gathered ahead of the one that runs.
        """
        self.root = root
        self.units = units
        self.prefetched = prefetched
        self.rank = rank
        self.order: list[nn.Module] = []
        """The blocks in the order in which a forward gathers them. A block that runs twice occurs twice."""
        self.is_known = False
        """True after the first forward, which defines the order."""
        self.position = 0
        """Number of blocks of the order that the present forward has gathered."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Run the block in step with the other ranks. All ranks enter it, each with at least one forward."""
        self._set_prefetch()
        hooks = [
            self.root.register_forward_pre_hook(self._begin, prepend=True),
            self.root.register_forward_hook(self._end),
            *(block.register_forward_pre_hook(self._visit, prepend=True) for block in self.units),
        ]
        try:
            yield
            self._follow()
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, inputs: object) -> None:
        """Announce a forward."""
        self.rank.max_over_dp([1])
        self.position = 0

    def _visit(self, block: nn.Module, inputs: object) -> None:
        """Gather the blocks that this forward has left out. FSDP2 gathers `block` when this hook has returned."""
        # Autocast would keep its copies of all float32 weights, which together are as large as the gathered module.
        torch.clear_autocast_cache()
        if self.is_known:
            self._gather_until(self._index(block))
        else:
            self.order.append(block)
        if len(self.units[block]) > 1:  # parts of the block would be gathered when they run
            self._unshard(block)
        self.position += 1

    def _end(self, module: nn.Module, inputs: object, output: object) -> None:
        """Gather the blocks that this forward has left out at its end."""
        torch.clear_autocast_cache()
        if not self.is_known:
            self._learn()
        self._gather_until(len(self.order))

    def _follow(self) -> None:
        """Gather along with the forwards of other ranks until none has any."""
        while self.rank.max_over_dp([0]) != [0]:
            if not self.is_known:
                raise RuntimeError("a rank without a single forward cannot sample in step with others: give it rows")
            self.position = 0
            self._gather_until(len(self.order))
            progress("gathered along with other ranks")

    def _index(self, block: nn.Module) -> int:
        """The place of a block that runs next. Raises ConfigError (2020) if the first forward ran it earlier."""
        for index in range(self.position, len(self.order)):
            if self.order[index] is block:
                return index
        raise IncompatibleError(
            f"a {_name(block)} of {_name(self.root)} runs in another order than in the first forward, "
            "so ranks cannot gather it in step. Sample with gathered weights (rollout.gather_weights=true)"
        )

    def _learn(self) -> None:
        """Take the order of the first forward, then the blocks that it left out.

        Raises ConfigError (2020) on all ranks if their orders differ.
        """
        self.order += [block for block in self.units if block not in self.order]
        numbers = {block: number for number, block in enumerate(self.units)}
        checksum = zlib.crc32(repr([numbers[block] for block in self.order]).encode())
        highest, lowest = self.rank.max_over_dp([checksum, -checksum])
        if highest != -lowest:
            raise IncompatibleError(
                f"the ranks ran the blocks of {_name(self.root)} in different orders in their first forward, so "
                "they cannot gather them in step. Sample with gathered weights (rollout.gather_weights=true)"
            )
        self.is_known = True
        self._set_prefetch()

    def _set_prefetch(self) -> None:
        """Let FSDP2 gather the next blocks of the order ahead of each block. None while the order is not known."""
        repeats = len(set(self.order)) < len(self.order)
        count = self.prefetched if self.is_known and not repeats else 0
        places = {block: place for place, block in enumerate(self.order)}
        for block, units in self.units.items():
            later = self.order[places[block] + 1 : places[block] + 1 + count] if count else []
            units[0].set_modules_to_forward_prefetch([unit for other in later for unit in self.units[other]])

    def _gather_until(self, end: int) -> None:
        """Gather and free the blocks of the order before `end` that are left out."""
        for block in self.order[self.position : end]:
            self._unshard(block)
            for unit in self.units[block]:
                unit.reshard()
        self.position = end

    def _unshard(self, block: nn.Module) -> None:
        for unit in self.units[block]:
            unit.unshard()


def _name(module: nn.Module) -> str:
    """The name of a module's class before FSDP2 derived its own from it."""
    return type(module).__name__.removeprefix("FSDP")
