"""Profiles steps of a run: a trace of torch's profiler for Perfetto, and a table of the longest operations per phase.

On a GPU the table has its kernels, on a CPU the operators of torch by their own time, without that of those they call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.config.live import ProfileConfig
from unirl.tracking.tables import replace_text
from unirl.tracking.timing import PhaseTimers
from unirl.types.device import devices_in_use

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

RANGE = "phase "
"""The beginning of the names of phases in a trace."""


@contextmanager
def profiled(config: ProfileConfig | None, step: int, timers: PhaseTimers, root: Path) -> Iterator[None]:
    """Profile the block if `step` is one of `config.steps`. Writes `profile/step-000003.json.gz` and `.md` into `root`.

    Args:
        step: the number of the step, from 1.
    """
    if config is None or step not in config.steps:
        yield
        return
    from torch.profiler import ProfilerActivity, profile, record_function

    devices = [ProfilerActivity.CUDA] if devices_in_use() is not None else []
    with profile(activities=[ProfilerActivity.CPU, *devices]) as profiler:
        timers.annotate = lambda name: record_function(RANGE + name)
        try:
            yield
        finally:
            timers.annotate = None
    folder = root / "profile"
    folder.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step-{step:06d}.json.gz"))
    table = page(step, list(profiler.events()), config.operations)
    replace_text(folder / f"step-{step:06d}.md", table)


def page(step: int, events: Sequence[FunctionEvent], count: int) -> str:
    """The longest operations of each phase, as Markdown.

    Args:
        count: the number of operations of each phase that are shown.
    """
    ranges = [event for event in events if event.name.startswith(RANGE) and event.name != f"{RANGE}step"]
    lines = [f"# Profile of step {step}", ""]
    for name in dict.fromkeys(event.name for event in ranges):
        spans = [event.time_range for event in ranges if event.name == name]
        inside = [
            event
            for event in events
            if not event.is_user_annotation and any(s.start <= event.time_range.start < s.end for s in spans)
        ]
        seconds = sum(span.end - span.start for span in spans) / 1e6
        lines += [f"## {name.removeprefix(RANGE)}: {seconds:.3g} s", "", *_table(inside, seconds, count), ""]
    return "\n".join(lines)


def _table(events: Sequence[FunctionEvent], seconds: float, count: int) -> list[str]:
    kernels: defaultdict[str, list[float]] = defaultdict(list)
    operators: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        operators[event.name].append(event.self_cpu_time_total / 1e6)
        for kernel in event.kernels:
            kernels[kernel.name].append(kernel.duration / 1e6)
    shown = kernels or operators
    ranked = sorted(shown.items(), key=lambda item: -sum(item[1]))[:count]
    rows = [
        f"| `{name.replace('|', ' ')}` | {sum(times):.4f} | {sum(times) / max(seconds, 1e-9):.1%} | {len(times)} |"
        for name, times in ranked
    ]
    what = "kernel" if kernels else "operator"
    return [f"| {what} | seconds | share of the phase | calls |", "|---|---|---|---|", *rows]
