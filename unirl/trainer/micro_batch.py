"""`stack.micro_batch_size=auto`: the plan chooses the rows of a micro-batch, and a GPU's memory is measured once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from unirl.config.recipe import RecipeConfig
from unirl.plan.cost import GIB, MemoryRow, memory_table
from unirl.plan.devices import DEFAULT, device_like, device_named
from unirl.plan.fit import usable
from unirl.plan.micro_batch import CPU_GIB, MicroBatchChoice, choose_micro_batch
from unirl.plan.sizes import RecipeSizes, RunSizes, resident_parts
from unirl.train.memory import DeviceMemory
from unirl.train.stack import TrainStack
from unirl.types.protocols import TrainingProgress
from unirl.types.rollout_resp import RolloutTrack


def chooses_micro_batch(config: RecipeConfig) -> bool:
    """True if the rows of a micro-batch are neither set nor cut by tokens."""
    return config.micro_batch_size is None and config.micro_batch_tokens is None


@dataclass(eq=False)
class MicroBatch:
    """The rows of a micro-batch of a run: chosen before its first step, lowered at most once, then kept.

    `RunState` saves them, so a continued run cuts its rows alike on any device.
    """

    sizes: RecipeSizes
    stack: TrainStack
    report: Callable[[str, object, str], None]
    """Called with the key, the rows, and the reason."""
    track: str = ""
    """The track whose rows these are, where several share the setting."""
    rows: int | None = None
    """None: not chosen yet, or left at the smallest legal number."""
    is_final: bool = False
    """The rows were measured, come from a checkpoint, or cannot be planned."""

    @property
    def key(self) -> str:
        """The key of the recipe that leaves the rows open, with the name of the track where several share it."""
        key = f"{self.sizes.config.stack.path}.micro_batch_size"
        return f"{key}[{self.track}]" if self.track else key

    def choose(self, saved: int | None) -> int | None:
        """Take the rows that the plan chooses for the device with the least memory, and return them.

        Args:
            saved: the rows of the checkpoint that the run continues, which are taken instead.
        """
        if saved is not None:
            self.rows, self.is_final = saved, True
            self.stack.use_micro_rows(saved)
            self.report(self.key, saved, f"{saved} rows, as in the checkpoint")
        elif self.sizes.run is None:
            self.is_final = True
            bundle = self.sizes.config.bundle.class_name
            self.report(self.key, None, f"the smallest, since {bundle} cannot estimate its sizes")
        else:
            self._use(self._chosen(self._device()))
        return self.rows

    def measure(self, track: RolloutTrack, now: TrainingProgress) -> int | None:
        """On a GPU, before the first update: measure the memory of two micro-batches, and lower the rows if too many.

        The rows are never raised, since the plan counts the longest responses, and the first step may have short ones.
        Returns the rows. Later calls do nothing.
        """
        if self.is_final:
            return self.rows
        device = self._device()
        is_smallest = self.sizes.run is None or self.rows == self.sizes.run.geometry.micro_sizes[0]
        self.is_final = True
        if is_smallest or device.num_bytes is None:
            return self.rows
        fitting = self._fitting(usable(device.num_bytes) - self._moments(), track, now)
        if fitting is not None:
            self._use(self._chosen(device, fitting), f"; by measurement, {fitting} would fit")
        return self.rows

    def applied_to(self, run: RunSizes) -> RunSizes:
        """The sizes of a run with the rows that were chosen."""
        return run if self.rows is None else replace(run, settings=replace(run.settings, micro_rows=self.rows))

    def _device(self) -> DeviceMemory:
        """The device with the least memory."""
        ranks = cast(list[DeviceMemory], self.stack.device_memory())  # a handle returns those of all ranks
        return min(ranks, key=lambda each: each.num_bytes or 0)

    def _chosen(self, memory: DeviceMemory, most: int | None = None) -> tuple[MicroBatchChoice, str]:
        """The plan's choice, of at most `most` rows, and the name of the device."""
        assert self.sizes.run is not None
        device = device_like(memory.name) or device_named(DEFAULT)[0]
        gib = CPU_GIB if memory.num_bytes is None else memory.num_bytes / GIB
        return choose_micro_batch(self.sizes.run, device, gib, most), memory.name

    def _use(self, chosen: tuple[MicroBatchChoice, str], why: str = "") -> None:
        choice, device = chosen
        self.rows = choice.rows
        self.stack.use_micro_rows(choice.rows)
        self.report(self.key, choice.rows, choice.describe(device) + why)

    def _fitting(self, num_bytes: float, track: RolloutTrack, now: TrainingProgress) -> int | None:
        """The rows that fit into so many bytes on every rank. None if memory does not limit them."""
        measured = [each.rows_that_fit(num_bytes) for each in self.stack.measure_memory(track, now)]
        limits = [rows for rows in measured if rows is not None]
        return min(limits) if limits else None

    def _moments(self) -> float:
        """Bytes of AdamW's moments, which the optimizer allocates in the first update."""
        run = self.sizes.run
        assert run is not None
        table: list[MemoryRow] = memory_table(run.sizes, run.settings, resident_parts(run.placement))
        return sum(row.gib["train"] * GIB for row in table if row.part == "optimizer")
