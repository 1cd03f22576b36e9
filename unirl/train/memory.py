"""The memory of a training device: what it has, and what a micro-batch takes of it, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unirl.types.device import device_module, device_name


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device that a process may use."""

    name: str
    """The product name of the device; "cpu" for a CPU."""
    num_bytes: int | None
    """Memory of the device, without that of other processes. None for a CPU."""


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of `device`."""
    module = device_module(device)
    if module is None:
        return DeviceMemory(device_name(device), None)
    free, total = module.mem_get_info(device)
    others = total - free - module.memory_reserved(device)
    return DeviceMemory(device_name(device), total - max(others, 0))


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The largest number of bytes that this process has allocated on `device`, no CPU, while `work` runs."""
    module = device_module(device)
    assert module is not None, "the allocations of a CPU are not counted"
    module.reset_peak_memory_stats(device)
    work()
    return int(module.max_memory_allocated(device))


@dataclass(frozen=True)
class MicroBatchMemory:
    """The peaks of a rank's device while micro-batches of two sizes are trained."""

    rows: tuple[int, int]
    """Rows of the smaller and of the larger micro-batch."""
    peaks: tuple[int, int]
    """Bytes with the smaller and with the larger micro-batch."""

    def rows_that_fit(self, num_bytes: float) -> int | None:
        """The most rows whose peak is at most `num_bytes`, where peaks grow linearly. None: memory sets no limit.

        The peak is the largest of several moments, so it may grow faster with more rows than between these two sizes.
        """
        (few, many), (low, high) = self.rows, self.peaks
        if high <= low:
            return None
        return few + int((num_bytes - low) * (many - few) // (high - low))
