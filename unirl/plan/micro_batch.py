"""The rows of a micro-batch that `stack.micro_batch_size=auto` takes: chosen by the cost model for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unirl.plan.cost import STEP_PHASES
from unirl.plan.devices import Device
from unirl.plan.fit import moment_peaks, usable
from unirl.plan.sizes import RunSizes
from unirl.plan.times import train_seconds

CPU_GIB = 8.0
"""Memory that a plan allows a run on CPUs, whatever the machine has, so that the choice is the same on all of them."""
FULL_SPEED = 1.01
"""A micro-batch is large enough if training takes at most this multiple of the time with the fastest that fits."""


@dataclass(frozen=True)
class MicroBatchChoice:
    """The micro-batch that a plan chooses."""

    rows: int
    peak_gib: float
    """The plan's peak of training on a device with it."""
    usable_gib: float
    """The memory that the plan may fill."""
    fits: bool
    """False if not even the smallest micro-batch fits, which is then the choice."""

    def describe(self, device: str) -> str:
        """The choice for people.

        Args:
            device: what the memory belongs to.
        """
        excess = "" if self.fits else ". Not even this fits; `unirl fit` searches other settings"
        return (
            f"{self.rows} rows; training peaks at {self.peak_gib:.1f} of {self.usable_gib:.1f} GiB by the plan, on "
            f"{device}{excess}"
        )


def choose_micro_batch(run: RunSizes, device: Device, memory_gib: float, most: int | None = None) -> MicroBatchChoice:
    """The smallest micro-batch that trains at full speed, among those that fit into memory.

    A larger one would only take more memory: past a few rows the kernels fill the device. The candidates cut a
    device's rows of an update into micro-batches of nearly equal size.

    Args:
        memory_gib: memory of a device.
        most: rows that are known to fit, from a measurement.
    """
    sizes = run.geometry.micro_sizes
    runs = [replace(run, settings=replace(run.settings, micro_rows=size)) for size in sizes]
    peaks = [train_peak_gib(each) for each in runs]
    fitting = [i for i, peak in enumerate(peaks) if peak <= usable(memory_gib)] or [0]
    seconds = {i: train_seconds(runs[i].sizes, runs[i].settings, device) for i in fitting}
    chosen = _fast_enough(seconds)
    if most is not None and sizes[chosen] > most:
        chosen = _fast_enough({i: seconds[i] for i in fitting if sizes[i] <= most} or {0: 0.0})
    return MicroBatchChoice(sizes[chosen], peaks[chosen], usable(memory_gib), peaks[chosen] <= usable(memory_gib))


def _fast_enough(seconds: Mapping[int, float]) -> int:
    """The smallest key whose time is about the shortest."""
    return min(key for key, value in seconds.items() if value <= FULL_SPEED * min(seconds.values()))


def train_peak_gib(run: RunSizes) -> float:
    """GiB at the peak of training, on the devices that need the most."""
    peaks = moment_peaks(run, run.settings)
    return max(peaks[moment] for moment in STEP_PHASES["train"])


def with_auto_micro(run: RunSizes, device: Device, memory_gib: float) -> RunSizes:
    """The run with the micro-batch that `auto` takes on a device. Unchanged if the recipe sets the rows itself."""
    geometry = run.geometry
    if not geometry.micro_is_auto or geometry.micro_batch_tokens is not None:
        return run
    rows = choose_micro_batch(run, device, memory_gib).rows
    return replace(run, settings=replace(run.settings, micro_rows=rows))
