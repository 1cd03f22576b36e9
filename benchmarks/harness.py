"""Times two ways of doing the same work as interleaved pairs, and writes the results as JSON.

A single ratio on a shared machine scatters by 10 %; the median over interleaved pairs does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")


@dataclass
class Ratio:
    """The time of our code in relation to the bare work that it cannot avoid."""

    name: str
    shapes: dict[str, int | float | str]
    ours_s: float
    bare_s: float
    ratio: float
    pairs: int
    ratios: list[float] = field(default_factory=list)


Clock = Callable[[], float]
"""Returns seconds: `time.perf_counter`, or `time.process_time` for one thread on a shared machine."""
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def measuring(about: str, pairs: int) -> argparse.ArgumentParser:
    """Returns a parser with the common options of benchmarks with several cases. `pairs` is the default of --pairs."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu needs OMP_NUM_THREADS=1")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names of cases (default: all)")
    parser.add_argument("--json", default=None)
    return parser


def paired(
    name: str,
    shapes: dict,
    ours: Callable[[], object],
    bare: Callable[[], object],
    pairs: int,
    clock: Clock = time.perf_counter,
) -> Ratio:
    """Returns medians over `pairs` runs of both, after a warm-up. The order of a pair alternates."""
    [result] = paired_by([clock], name, shapes, ours, bare, pairs)
    return result


def paired_by(
    clocks: Sequence[Clock],
    name: str,
    shapes: dict,
    ours: Callable[[], object],
    bare: Callable[[], object],
    pairs: int,
) -> list[Ratio]:
    """Returns the result of `paired` by each clock, all from the same runs."""
    ours(), bare()
    times: list[tuple[list[float], list[float]]] = []
    for i in range(pairs):
        if i % 2:
            b, a = seconds_by(clocks, bare), seconds_by(clocks, ours)
        else:
            a, b = seconds_by(clocks, ours), seconds_by(clocks, bare)
        times.append((a, b))
    return [ratio_of(name, shapes, [(a[i], b[i]) for a, b in times]) for i in range(len(clocks))]


def ratio_of(name: str, shapes: dict, times: Sequence[tuple[float, float]]) -> Ratio:
    """Returns the medians of pairs of times, ours and bare."""
    ratios = [a / b for a, b in times]
    return Ratio(
        name=name,
        shapes=shapes,
        ours_s=statistics.median(a for a, _ in times),
        bare_s=statistics.median(b for _, b in times),
        ratio=statistics.median(ratios),
        pairs=len(times),
        ratios=[round(r, 4) for r in ratios],
    )


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors that one run allocated on the device."""

    peak: int
    kept: int
    """Bytes that are still allocated at the end, with the result of the run."""


def memory(work: Callable[[], object], device: torch.device = CPU) -> Memory:
    """Returns the memory of one run from the allocator of its device, so it is the same at every run."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        del result
        return Memory(peak, kept)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = work()
    del result
    assert run.profiler is not None and run.profiler.kineto_results is not None
    changes = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    sums = list(accumulate((event.nbytes() for event in changes), initial=0))
    return Memory(max(sums), sums[-1])


def seconds(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Returns the seconds of one run, device work included."""
    [result] = seconds_by([clock], work)
    return result


def seconds_by(clocks: Sequence[Clock], work: Callable[[], object]) -> list[float]:
    """Returns the seconds of one run by each clock."""
    synchronise()
    starts = [clock() for clock in clocks]
    work()
    synchronise()
    return [clock() - start for clock, start in zip(clocks, starts, strict=True)]


def synchronise() -> None:
    """Waits for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, str | int]:
    """Returns the machine and the versions of libraries, on which the figures depend."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
    }


def report(results: Sequence[Ratio], path: str | None) -> None:
    """Prints one line per result, and writes all results as JSON if `path` is given."""
    for result in results:
        show(result)
    if path:
        write(results, path)


def show(r: Ratio) -> None:
    """Prints one result."""
    print(
        f"{r.name:32s} ours {r.ours_s:8.4f} s   bare {r.bare_s:8.4f} s   ratio {r.ratio:.3f}   "
        f"({r.pairs} pairs) {r.shapes}",
        flush=True,
    )


def write(results: Sequence[Ratio], path: str) -> None:
    """Writes machine and results as JSON."""
    content = {"machine": machine(), "results": [asdict(r) for r in results]}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
