"""An index of all stored samples of a run: filters and orders 100,000 of them, and reads those that are shown.

The facts by which samples are found stand in columns; the rows themselves are read again from the manifests.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unirl.tracking.record import RunRecord, StoredSamples
from unirl.tracking.samples import SampleRow

Kind = Literal["samples", "eval"]
"""Training samples, or those of evaluations; the name of their folder."""
Order = Literal["newest", "best", "worst"]
MANIFESTS: dict[Kind, str] = {"samples": "manifest.jsonl", "eval": "scores.json"}
SEARCHED = 300
"""Characters at the start of a prompt in which a filter searches."""
MAX_STEPS = 16
"""Steps whose rows are kept after they were read."""

MAX_QUERIES = 8
"""Queries whose numbers are kept, for the later parts of a list."""


@dataclass(frozen=True)
class SampleQuery:
    """The samples that are asked for."""

    kind: Kind | None = None
    first_step: int | None = None
    last_step: int | None = None
    prompt: str = ""
    """Text in the prompt. Upper and lower case are equal."""
    score: str = ""
    """The score that `low`, `high` and `order` are about: a component, or empty for the reward."""
    low: float | None = None
    high: float | None = None
    order: Order = "newest"


@dataclass(frozen=True)
class IndexedSample:
    """A stored sample and its place: the kind and step of its folder, and its row in the manifest."""

    kind: Kind
    step: int
    row: int
    facts: SampleRow


class SampleIndex:
    """The stored samples of one run."""

    def __init__(self) -> None:
        self._start()
        self._read: OrderedDict[tuple[Kind, int, object], StoredSamples] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def scores(self) -> list[str]:
        """The components that any sample has, sorted."""
        return sorted(self._scores)

    def advance(self, run: RunRecord, until: float = math.inf) -> bool:
        """Reads further steps, newest first, until the moment `until` of `time.monotonic`. Returns True at the end.

        If the samples of a step that was read are gone or were replaced, the index starts again.
        """
        places: dict[Kind, Sequence[int]] = {"eval": run.evaluated, "samples": run.sampled}
        found = {(kind, step): _signature(run, kind, step) for kind, steps in places.items() for step in steps}
        if any(found.get(place) != signature for place, signature in self._known.items()):
            self._start()
        for kind, step in sorted(found.keys() - self._known.keys(), key=lambda place: -place[1]):
            self._add(kind, self._stored(run, kind, step, found[kind, step]))
            self._known[kind, step] = found[kind, step]
            if time.monotonic() > until:
                return len(self._known) == len(found)
        return True

    def find(self, query: SampleQuery, size: int | None = None) -> np.ndarray:
        """The numbers [n] of the samples of a query in its order, among the first `size` that were indexed.

        With the same `size`, a query gives the same numbers while further steps are read.
        """
        size = len(self) if size is None else min(size, len(self))
        if (query, size) not in self._found:
            if len(self._found) >= MAX_QUERIES:
                self._found.popitem(last=False)
            self._found[query, size] = self._search(query, size)
        return self._found[query, size]

    def _search(self, query: SampleQuery, size: int) -> np.ndarray:
        steps, rows, kinds = (np.array(column[:size]) for column in (self._steps, self._rows, self._kinds))
        score = self._rewards if not query.score else self._scores.get(query.score, array("d"))
        values = np.full(size, np.nan)
        values[: min(size, len(score))] = score[:size]
        chosen = np.ones(size, dtype=bool)
        if query.kind is not None:
            chosen &= kinds == list(MANIFESTS).index(query.kind)
        if query.first_step is not None:
            chosen &= steps >= query.first_step
        if query.last_step is not None:
            chosen &= steps <= query.last_step
        if query.low is not None:
            chosen &= values >= query.low
        if query.high is not None:
            chosen &= values <= query.high
        if query.score:
            chosen &= ~np.isnan(values)
        if query.prompt:
            wanted = query.prompt.casefold()
            has_words = np.array([wanted in text for text in self._texts], dtype=bool)
            chosen &= has_words[np.array(self._prompts[:size], dtype=np.int64)] if len(has_words) else False
        numbers = np.flatnonzero(chosen)
        newest = (rows[numbers], kinds[numbers], -steps[numbers])
        if query.order == "newest":
            return numbers[np.lexsort(newest)]
        sign = -1 if query.order == "best" else 1
        ranks = np.nan_to_num(sign * values[numbers], nan=np.inf, posinf=np.inf, neginf=-np.inf)
        return numbers[np.lexsort((*newest, ranks))]

    def samples(self, run: RunRecord, numbers: Sequence[int]) -> list[IndexedSample]:
        """The samples of these numbers. Those that are gone are left out."""
        kinds = list(MANIFESTS)
        places = [(kinds[self._kinds[n]], self._steps[n], self._rows[n]) for n in numbers]
        found = (self.sample(run, *place) for place in places)
        return [sample for sample in found if sample is not None]

    def sample(self, run: RunRecord, kind: Kind, step: int, row: int) -> IndexedSample | None:
        """The sample at a place. None if there is none."""
        stored = self.step(run, kind, step)
        return IndexedSample(kind, step, row, stored.rows[row]) if 0 <= row < len(stored.rows) else None

    def step(self, run: RunRecord, kind: Kind, step: int) -> StoredSamples:
        """All stored samples of a step. Empty if there are none."""
        signature = _signature(run, kind, step)
        if signature is None:
            return StoredSamples(step, f"{kind}/step-{step:06d}", ())
        return self._stored(run, kind, step, signature)

    def _start(self) -> None:
        self._known: dict[tuple[Kind, int], object] = {}
        self._found: OrderedDict[tuple[SampleQuery, int], np.ndarray] = OrderedDict()
        self._kinds, self._steps, self._rows = array("b"), array("q"), array("q")
        self._rewards = array("d")
        self._scores: dict[str, array[float]] = {}
        self._prompts = array("q")
        self._texts: dict[str, int] = {}
        """Starts of the prompts, in lower case, by number."""

    def _add(self, kind: Kind, stored: StoredSamples) -> None:
        for number, row in enumerate(stored.rows):
            position = len(self._rows)
            self._kinds.append(list(MANIFESTS).index(kind))
            self._steps.append(stored.step)
            self._rows.append(number)
            self._rewards.append(row.reward)
            for name, value in row.rewards.items():
                column = self._scores.setdefault(name, array("d"))
                column.extend([math.nan] * (position - len(column)))
                column.append(value)
            self._prompts.append(self._texts.setdefault(row.prompt[:SEARCHED].casefold(), len(self._texts)))

    def _stored(self, run: RunRecord, kind: Kind, step: int, signature: object) -> StoredSamples:
        key = kind, step, signature
        if key in self._read:
            self._read.move_to_end(key)
            return self._read[key]
        stored = run.evaluation(step) if kind == "eval" else run.samples(step)
        self._read[key] = stored
        if len(self._read) > MAX_STEPS:
            self._read.popitem(last=False)
        return stored


def _signature(run: RunRecord, kind: Kind, step: int) -> object:
    """What changes when the manifest of a step is replaced. None if it is gone."""
    try:
        state = os.stat(run.root / f"{kind}/step-{step:06d}" / MANIFESTS[kind])
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size
