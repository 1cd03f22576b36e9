"""Reads a table of a run that may grow, be replaced, or be damaged, each line once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import BinaryIO, Generic, TypeVar

from unirl.tracking.run_files import MAX_LINE, RunFiles, object_of
from unirl.tracking.step_tables import EventsFold, LedgerFold, MetricsFold

FoldT = TypeVar("FoldT", MetricsFold, LedgerFold, EventsFold)
TAIL = 256
"""Bytes before the place where reading goes on that must be those that were read."""
LINES_PER_CHECK = 64
"""Lines after which the clock is read."""


class FoldedTable(Generic[FoldT]):
    """A JSON-lines file, and the fold of its rows up to the place where the last reading ended."""

    def __init__(self, make: Callable[[], FoldT]) -> None:
        self._make: Callable[[], FoldT] = make
        self._start()

    def advance(self, files: RunFiles, until: float = math.inf) -> bool:
        """Reads on to the end of the file, or to the moment `until` of `time.monotonic`. Returns True at the end.

        A file that was replaced is read from its start. Half a line at the end is left for the next time.
        """
        file = files.open(self.fold.name)
        if file is None:
            self._start()
            return True
        with file:
            if not self._goes_on(file):
                self._start()
            file.seek(self._offset)
            for line in iter(lambda: file.readline(MAX_LINE), b""):
                if not line.endswith(b"\n") and len(line) < MAX_LINE:
                    break  # The run is writing this line, or was killed while it did.
                self._take(line)
                if self._lines % LINES_PER_CHECK == 0 and time.monotonic() > until:
                    return False
        return True

    def report(self, files: RunFiles) -> None:
        """Lists what was wrong with the lines that were read."""
        if self._damaged:
            count, first = self._damaged
            files.problem(self.fold.name, f"{count} of {self._lines} lines are damaged, the first is line {first}")
        self.fold.report(files)

    def _start(self) -> None:
        self.fold: FoldT = self._make()
        self._offset, self._lines, self._tail = 0, 0, b""
        self._damaged: tuple[int, int] | None = None
        """Number of damaged lines, and the number of the first one."""

    def _goes_on(self, file: BinaryIO) -> bool:
        """Returns True if the file still has what was read last, at the same place."""
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _take(self, line: bytes) -> None:
        self._offset += len(line)
        self._lines += 1
        self._tail = line[-TAIL:]
        row = object_of(line)
        if row is not None:
            self.fold.add(row)
        elif self._damaged is None:
            self._damaged = 1, self._lines
        else:
            self._damaged = self._damaged[0] + 1, self._damaged[1]


class RunTables:
    """The three tables of a run that grow with its steps."""

    def __init__(self) -> None:
        self.metrics = FoldedTable(MetricsFold)
        self.ledger = FoldedTable(LedgerFold)
        self.events = FoldedTable(EventsFold)

    def advance(self, files: RunFiles, until: float = math.inf) -> bool:
        """Reads on in each table. Returns True if all were read to their end."""
        return all(
            [self.ledger.advance(files, until), self.events.advance(files, until), self.metrics.advance(files, until)]
        )
