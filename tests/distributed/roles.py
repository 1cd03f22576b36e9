"""Roles that tests place on workers of either runtime; importable there."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from operator import getitem
from pathlib import Path

import torch
from torch import Tensor

from unirl.config.errors import DataError
from unirl.config.plugins import forget
from unirl.distributed import current
from unirl.distributed.group.dispatch import broadcast, collect, rank0, scatter
from unirl.types.batch import Batch, row
from unirl.types.progress import progress


@dataclass(kw_only=True, eq=False)
class Shots(Batch):
    """Rows with something heavy."""

    ids: Tensor = row()  # [B]
    pixels: Tensor = row(heavy=True)  # [B, 256, 256], each full of its id
    pids: Tensor = row()  # [B] the process that made the row


class Camera:
    """Makes heavy rows, reads them back, and knows where it is."""

    def __init__(self, siblings) -> None:
        self.siblings = dict(siblings)

    @scatter(Shots.concat, order=Shots.select)
    def shoot(self, ids: Batch) -> Shots:
        pixels = ids.ids.float().view(-1, 1, 1).repeat(1, 256, 256)
        return Shots(ids=ids.ids, pixels=pixels, pids=torch.full_like(ids.ids, os.getpid()))

    @scatter(torch.cat, order=getitem)
    def develop(self, shots: Shots) -> Tensor:
        assert torch.is_tensor(shots.pixels)
        return shots.pixels.mean(dim=(1, 2))

    @scatter(list)
    def rows_of_ranks(self, shots: Shots) -> list[int]:
        return shots.ids.tolist()

    @rank0
    def lead(self) -> int:
        return current().rank

    @broadcast
    def crawl(self, step_s: float, steps: int, then_s: float = 0.0) -> int:
        """Makes progress `steps` times, then sleeps."""
        for _ in range(steps):
            time.sleep(step_s)
            progress("crawled a step")
        time.sleep(then_s)
        return steps

    @collect
    def rank_facts(self) -> list[tuple[int, int, int, int]]:
        rank = current()
        return (rank.rank, rank.world_size, rank.dp_rank, rank.dp_size)

    @collect
    def pids(self) -> int:
        return os.getpid()

    @collect
    def threads(self) -> int:
        return torch.get_num_threads()

    @collect
    def visible(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @collect
    def sibling_names(self) -> list[str]:
        return sorted(self.siblings)

    @broadcast
    def total(self) -> float:
        return current().sum_over_dp(float(current().rank + 1))

    @broadcast
    def nothing(self) -> None:
        pass

    @broadcast
    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @broadcast
    def last_progress_inside(self, folder: str, module: str) -> str:
        """The last progress that a module of a folder sees while it is imported."""
        sys.path.insert(0, folder)
        try:
            seen: str = importlib.import_module(module).SEEN
        finally:
            sys.path.remove(folder)
        return seen

    def private(self) -> None:
        raise AssertionError


@dataclass(kw_only=True, eq=False)
class Ids(Batch):
    ids: Tensor = row()  # [B]


def ids(count: int) -> Ids:
    return Ids(ids=torch.arange(count))


class Saboteur:
    """Fails in the ways that workers do."""

    def __init__(self, siblings) -> None:
        forget()  # The workers are shared, and roles of other tests may have made this package a plugin.

    @broadcast
    def fail(self) -> None:
        raise DataError("the prompt is empty")

    @broadcast
    def crash(self) -> None:
        raise KeyError("of mine")

    @broadcast
    def exhaust(self) -> None:
        raise MemoryError

    @broadcast
    def fail_on_last(self) -> float:
        rank = current()
        if rank.rank == rank.world_size - 1:
            raise KeyError("of rank 1")
        return rank.sum_over_dp(1.0)

    @broadcast
    def die_on_last(self, started: str) -> float:
        """The last rank never comes; another process is to kill it once it has written its pid."""
        rank = current()
        if rank.rank == rank.world_size - 1:
            Path(started).write_text(str(os.getpid()))
            threading.Event().wait()
        return rank.sum_over_dp(1.0)

    @broadcast
    def vanish(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @broadcast
    def deadlock(self, folder: str | None = None) -> None:
        """Every rank but the first waits for the first, which waits for nobody to come.

        Args:
            folder: gets a file for each rank before it waits, when the ranks have met.
        """
        rank = current().rank
        if folder is not None:
            current().sum_over_dp(1.0)
            (Path(folder) / str(rank)).touch()
        if rank == 0:
            threading.Event().wait()
        current().sum_over_dp(1.0)

    @collect
    def unpicklable(self) -> object:
        return threading.Lock()
