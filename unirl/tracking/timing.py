"""Where time and memory go: the wall time of named phases, spans of phases and calls, and the peaks of this process."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeVar

from unirl.types.device import devices_in_use

GIB = 2**30
ResultT = TypeVar("ResultT")
SpanKind = Literal["phase", "call"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a phase of the loop, or a call of a role as the driver sees it, began and ended."""

    number: int
    parent: int | None
    """The number of the span within which this one began."""
    kind: SpanKind
    name: str
    """The phase, such as `generate`, or the call, such as `rollout.generate`."""
    start_ns: int
    """Nanoseconds since 1970-01-01 UTC."""
    end_ns: int
    has_failed: bool = False
    """The block or the call raised an exception."""


class _Open(threading.local):
    """The numbers of the spans that one thread is in, the innermost last."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


class Spans:
    """Records the spans of the driver's threads. A span lies within another one of its own thread."""

    def __init__(self) -> None:
        self._ended: list[Span] = []
        self._open = _Open()
        self._numbers = count(1)

    @contextmanager
    def span(self, name: str, kind: SpanKind) -> Iterator[None]:
        """Records the block."""
        number, end = self._begin(name, kind)
        self._open.numbers.append(number)
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._open.numbers.pop()
            end(has_failed)

    def until_result(self, name: str, wait: Callable[[float], ResultT]) -> Callable[[float], ResultT]:
        """`wait`, recorded as a call that begins at once and ends with its result. It may outlast its parent."""
        _, end = self._begin(name, "call")

        def wait_and_record(deadline_s: float) -> ResultT:
            has_failed = True
            try:
                result = wait(deadline_s)
                has_failed = False
                return result
            finally:
                end(has_failed)

        return wait_and_record

    def take(self) -> list[Span]:
        """The spans that ended since the last call, in the order of their ends."""
        spans, self._ended = self._ended, []
        return spans

    def _begin(self, name: str, kind: SpanKind) -> tuple[int, Callable[[bool], None]]:
        """Opens a span. Returns its number, and the function that ends it, which takes whether it has failed."""
        number, parent = next(self._numbers), next(reversed(self._open.numbers), None)
        start_ns, start = time.time_ns(), time.perf_counter_ns()

        def end(has_failed: bool) -> None:
            end_ns = start_ns + time.perf_counter_ns() - start
            self._ended.append(
                Span(
                    number=number,
                    parent=parent,
                    kind=kind,
                    name=name,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    has_failed=has_failed,
                )
            )

        return number, end


class PhaseTimers:
    """Sums the wall time of named phases: `with timers.phase("generate"): ...`, then `take()` once per step.

    Phases of several threads may overlap. A phase counts for the step in which it ends.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        """
        Args:
            spans: records each phase as a span.
        """
        self.spans = spans
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        """Marks each phase in the trace of a profiler."""
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, also if it raises. Waits for the GPU, so queued work counts for the phase that queued it."""
        with (
            nullcontext() if self.spans is None else self.spans.span(name, "phase"),
            nullcontext() if self.annotate is None else self.annotate(name),
        ):
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
