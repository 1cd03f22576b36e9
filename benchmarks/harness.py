"""Times two ways of doing the same work as interleaved pairs, and writes what it saw as JSON.

A single ratio on a shared machine scatters by 10 %; the median over interleaved pairs does not.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch


@dataclass
class Ratio:
    """Ours over the bare work that it cannot avoid."""

    name: str
    shapes: dict[str, int | float | str]
    ours_s: float
    bare_s: float
    ratio: float
    pairs: int
    ratios: list[float] = field(default_factory=list)


def paired(name: str, shapes: dict, ours: Callable[[], object], bare: Callable[[], object], pairs: int) -> Ratio:
    """Medians over `pairs` interleaved runs of each, after one warm-up of both; the order alternates."""
    ours(), bare()
    times: list[tuple[float, float]] = []
    for i in range(pairs):
        if i % 2:
            b, a = seconds(bare), seconds(ours)
        else:
            a, b = seconds(ours), seconds(bare)
        times.append((a, b))
    ratios = [a / b for a, b in times]
    return Ratio(
        name=name,
        shapes=shapes,
        ours_s=statistics.median(a for a, _ in times),
        bare_s=statistics.median(b for _, b in times),
        ratio=statistics.median(ratios),
        pairs=pairs,
        ratios=[round(r, 4) for r in ratios],
    )


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one run, device work included."""
    synchronise()
    start = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - start


def synchronise() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, str | int]:
    """What the figures depend on besides the code."""
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


def report(results: list[Ratio], path: str | None) -> None:
    """Print a line per result; write everything as JSON when `path` is given."""
    for r in results:
        print(
            f"{r.name:32s} ours {r.ours_s:8.4f} s   bare {r.bare_s:8.4f} s   ratio {r.ratio:.3f}   "
            f"({r.pairs} pairs) {r.shapes}"
        )
    if path:
        content = {"machine": machine(), "results": [asdict(r) for r in results]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
