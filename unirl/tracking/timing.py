"""Where the time and the memory of a step went."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

GIB = 2**30


class PhaseTimers:
    """Adds up the wall time of named phases: `with timers.phase("generate"): ...`, then `take()` once a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also when it raises. Work queued on a GPU belongs to the phase that queued it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            _wait_for_device()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`time/<phase>` in seconds since the last call, which starts anew."""
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


def peak_memory() -> dict[str, float]:
    """`mem/*` in GiB: the largest resident size so far, and the device's largest allocation since last asked."""
    found = {"mem/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT / GIB}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["mem/device_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
    return found


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
