"""What the tables of a run say, summed up row by row: its metrics, its ledger and its events.

Each fold is given the rows of a table in order, and can be read at any time, so a table that grows is read once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any

from unirl.tracking.run_files import RunFiles, number, numbers
from unirl.tracking.tables import Row

MAX_ROWS = 4096
"""Rows of the metrics that are kept. Of more steps, evenly spaced ones are."""
MAX_EVENTS = 1000
"""Newest events that are kept beside the ends of steps, which are only counted."""

SUMMED = ("time/", "samples/", "mem/")
"""Starts of metrics whose sum, or for `mem/` whose largest value, is kept over all rows."""


@dataclass(frozen=True)
class Progress:
    """How far a run was after a step."""

    samples: float
    """Samples that were generated for training until then."""
    seconds: float
    """Seconds of all steps until then."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of the steps."""

    rows: tuple[Mapping[str, float], ...] = ()
    """Rows with their `step`, in order: all, or MAX_ROWS/2 to MAX_ROWS evenly spaced ones and the last."""
    count: int = 0
    """Number of all rows."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Sum over all rows of each metric in `time/` and `samples/`."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Largest value over all rows of each metric in `mem/`."""
    progress: tuple[Progress, ...] = ()
    """One per row of `rows`. It counts the rows that were left out, too."""

    @property
    def first(self) -> Mapping[str, float]:
        return self.rows[0] if self.rows else {}

    @property
    def last(self) -> Mapping[str, float]:
        return self.rows[-1] if self.rows else {}

    def names(self) -> list[str]:
        """The metrics that any row has, sorted."""
        return sorted({name for row in self.rows for name in row} - {"step"})

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Step and value of a metric, at the rows that have it."""
        return [(row["step"], row[name]) for row in self.rows if name in row]


@dataclass(frozen=True)
class Ledger:
    """What became of the samples of all steps."""

    generated: int = 0
    scored: int = 0
    dropped: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped samples by reason."""


@dataclass(frozen=True)
class Events:
    """The events of a run."""

    counts: Mapping[str, int]
    kept: tuple[Row, ...]
    """The newest MAX_EVENTS events, oldest first, without `step.end`."""

    def named(self, *names: str) -> list[Row]:
        """The kept events with one of these names."""
        return [event for event in self.kept if event.get("ev") in names]


class MetricsFold:
    """Sums up metrics.jsonl."""

    name = "metrics.jsonl"

    def __init__(self) -> None:
        self._kept: list[tuple[Mapping[str, float], Progress]] = []
        self._last: tuple[Mapping[str, float], Progress] | None = None
        self._totals: Counter[str] = Counter()
        self._peaks: dict[str, float] = {}
        self._count, self._stride, self._without_step = 0, 1, 0
        self._names: frozenset[str] = frozenset()
        self._summed: list[str] = []

    def add(self, entry: Row) -> None:
        row = numbers(entry)
        if "step" not in row:
            self._without_step += 1
            return
        for name in self._wanted(row):
            if name.startswith("mem/"):
                self._peaks[name] = max(row[name], self._peaks.get(name, row[name]))
            else:
                self._totals[name] += row[name]  # type: ignore[assignment]  # a Counter of floats
        self._last = row, Progress(self._totals["samples/generated"], self._totals["time/step"])
        if self._count % self._stride == 0:
            self._kept.append(({intern(name): value for name, value in row.items()}, self._last[1]))
            self._last = self._kept[-1]
            if len(self._kept) > MAX_ROWS:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
        self._count += 1

    def _wanted(self, row: Mapping[str, float]) -> list[str]:
        """The metrics of a row that are summed up. Most rows have the metrics of the row before."""
        if row.keys() != self._names:
            self._names = frozenset(row)
            self._summed = [name for name in row if name.startswith(SUMMED)]
        return self._summed

    def report(self, files: RunFiles) -> None:
        """Lists what was wrong with the rows."""
        if self._without_step:
            files.problem(self.name, f"{self._without_step} rows have no step")

    @property
    def result(self) -> Metrics:
        kept = list(self._kept)
        if self._last is not None and kept[-1] is not self._last:
            kept.append(self._last)
        rows, progress = tuple(row for row, _ in kept), tuple(done for _, done in kept)
        return Metrics(rows, self._count, dict(self._totals), dict(self._peaks), progress)


class LedgerFold:
    """Sums up ledger.jsonl."""

    name = "ledger.jsonl"

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def add(self, entry: Row) -> None:
        for name in ("generated", "scored", "dropped"):
            self._counts[name] += _count(entry.get(name))
        for reason, dropped in mapping(entry.get("reasons")).items():
            self._reasons[str(reason)] += _count(dropped)

    def report(self, files: RunFiles) -> None:
        """Nothing of a ledger is wrong that is not a damaged line."""

    @property
    def result(self) -> Ledger:
        counts = self._counts
        return Ledger(counts["generated"], counts["scored"], counts["dropped"], dict(self._reasons))


class EventsFold:
    """Sums up events.jsonl, which also has the events of steps that were cut back after a restart."""

    name = "events.jsonl"

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._kept: deque[Row] = deque(maxlen=MAX_EVENTS)

    def add(self, entry: Row) -> None:
        self._counts[str(entry.get("ev"))] += 1
        if entry.get("ev") != "step.end":
            self._kept.append(entry)

    def report(self, files: RunFiles) -> None:
        """Nothing of an event is wrong that is not a damaged line."""

    @property
    def result(self) -> Events:
        return Events(dict(self._counts), tuple(self._kept))


def mapping(value: object) -> Mapping[Any, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int:
    """A number of samples. 0 if it is no finite number."""
    parsed = number(value)
    return int(parsed) if parsed is not None and abs(parsed) < 1e18 else 0
