"""Compares two reports of one workload: the ratio of each figure with an interval over the repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unirl.bench.report import BenchReport
from unirl.tracking.paired import LEVEL, Interval


@dataclass(frozen=True)
class FigureRatio:
    """One figure of two reports."""

    name: str
    before: float
    """Geometric mean over the repeats of the first report."""
    after: float
    interval: Interval | None
    """The interval of `after / before`. None if a report has a single repeat."""

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def differs(self) -> bool:
        """True if the interval excludes 1."""
        return self.interval is not None and not self.interval.low <= 1.0 <= self.interval.high


def ratios(first: BenchReport, second: BenchReport) -> list[FigureRatio]:
    """The figures that both reports have and that are positive in every repeat."""
    result = []
    for name, figure in first.figures.items():
        other = second.figures.get(name)
        if other is not None and min(*figure.values, *other.values) > 0:
            before, after = (statistics.geometric_mean(each.values) for each in (figure, other))
            result.append(FigureRatio(name, before, after, ratio_interval(figure.values, other.values)))
    return result


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Welch's interval of a ratio of geometric means: the t interval of the difference of the mean logarithms.

    Welch 1947, The generalization of Student's problem when several different population variances are involved.

    Args:
        before: one positive value per repeat; so is `after`.

    Returns:
        The interval of level LEVEL of `after / before`. None if either has fewer than two values.
    """
    from scipy.stats import t

    logs = [[math.log(value) for value in values] for values in (before, after)]
    if min(map(len, logs)) < 2:
        return None
    difference = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    squares = [statistics.variance(values) / len(values) for values in logs]
    error = math.sqrt(sum(squares))
    if error == 0.0:
        return Interval(math.exp(difference), math.exp(difference))
    freedom = error**4 / sum(square**2 / (len(values) - 1) for square, values in zip(squares, logs, strict=True))
    reach = error * float(t.ppf((1 + LEVEL) / 2, freedom))
    return Interval(math.exp(difference - reach), math.exp(difference + reach))


def incomparable(first: BenchReport, second: BenchReport) -> list[str]:
    """Why a ratio of the two reports says nothing about the code: other work, or another machine. Empty if it does."""
    pairs = {
        "the workload": (first.workload, second.workload),
        "the size": (first.size, second.size),
        "the model": (first.model.path, second.model.path),
        "the prompts of a step": (first.work.prompts, second.work.prompts),
        "the samples of a step": (first.work.samples, second.work.samples),
        "the steps before those that count": (first.protocol.warmup, second.protocol.warmup),
        "the processor": (first.machine.cpu, second.machine.cpu),
        "the number of processors": (first.machine.cpus, second.machine.cpus),
        "the accelerator": (first.machine.accelerator, second.machine.accelerator),
    }
    keys = dict.fromkeys([*first.work.sampling, *second.work.sampling])
    absent = "absent"
    pairs |= {
        f"sampling.{key}": (first.work.sampling.get(key, absent), second.work.sampling.get(key, absent)) for key in keys
    }
    return [f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]


def differences(first: BenchReport, second: BenchReport) -> Iterator[str]:
    """Differences of settings and machines between the two reports, which may explain their figures."""
    pairs = {
        "engine": (first.engine, second.engine),
        "commit": (first.commit, second.commit),
        "settings": (" ".join(first.overrides) or "none", " ".join(second.overrides) or "none"),
        "devices": (first.topology.num_devices, second.topology.num_devices),
        "runtime": (first.topology.runtime, second.topology.runtime),
        "placement": (first.topology.placement, second.topology.placement),
        "dtype": (first.model.dtype, second.model.dtype),
        "lora": (first.parallelism.lora, second.parallelism.lora),
        "fsdp": (first.parallelism.fsdp, second.parallelism.fsdp),
        "parallelism": (first.parallelism.topology, second.parallelism.topology),
        "threads": (first.environment.threads, second.environment.threads),
        "repeats": (first.protocol.repeats, second.protocol.repeats),
        "steps": (first.protocol.steps, second.protocol.steps),
        "ceiling of MFU": (first.ceiling, second.ceiling),
    }
    versions = [report.environment.versions for report in (first, second)]
    pairs |= {
        name: (versions[0].get(name), versions[1].get(name)) for name in sorted(versions[0].keys() | versions[1].keys())
    }
    for name, (a, b) in pairs.items():
        if a != b:
            yield f"{name}: {_shown(a)} -> {_shown(b)}"


def _shown(value: object) -> str:
    from unirl.bench.report import Ceiling
    from unirl.tracking.record import Commit

    if isinstance(value, Commit):
        return value.commit[:12] + (" with changes" if value.changed else "")
    if isinstance(value, Ceiling):
        return f"{value.tflops:.4g} TFLOP/s ({value.source})"
    return str(value)
