"""Where time and memory go: the wall time of named phases, and the peaks of this process."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from unirl.types.device import devices_in_use

GIB = 2**30


class PhaseTimers:
    """Sums the wall time of named phases: `with timers.phase("generate"): ...`, then `take()` once per step.

    Phases of several threads may overlap. A phase counts for the step in which it ends.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also if it raises. Waits for the GPU, so queued work counts for the phase that queued it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            devices = devices_in_use()
            if devices is not None:
                devices.synchronize()
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """The time of a phase since the last `take`."""
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """Returns `time/<phase>` in seconds since the last call, and resets the timers."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}


def peak_memory() -> dict[str, float]:
    """`mem/*` in GiB: the largest resident size so far, and the largest device allocation since the last call."""
    unit = 1 if sys.platform == "darwin" else 1024
    metrics = {"mem/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    devices = devices_in_use()
    if devices is not None:
        metrics["mem/device_peak_gib"] = devices.max_memory_allocated() / GIB
        devices.reset_peak_memory_stats()
    return metrics
