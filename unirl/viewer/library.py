"""The runs that a viewer may show, and what it has read of each until now."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unirl.tracking.catalog import run_roots
from unirl.tracking.folded_table import RunTables
from unirl.tracking.record import RunRecord
from unirl.tracking.sample_index import SampleIndex

READING_S = 0.4
"""Seconds for which one request reads on in the tables of a run, or in its samples. The page asks for the rest."""
MAX_OPEN = 8
"""Runs whose tables and index are kept. Those of a run that was not asked for the longest are given up first."""


class NoSuchRun(LookupError):
    """No run of the given folders has this id."""


class OpenRun:
    """One run, and what was read of its tables and samples."""

    def __init__(self, id: str, root: Path) -> None:
        self.id, self.root = id, root
        self.index = SampleIndex()
        self._tables = RunTables()
        self._lock = threading.Lock()
        self.tables_are_complete = self.index_is_complete = False

    @contextmanager
    def reading(self, tables: bool = True, index: bool = False) -> Iterator[RunRecord]:
        """The record of the run at this moment, for one thread at a time.

        Args:
            tables: read on in metrics, ledger and events.
            index: read on in the samples.
        """
        with self._lock:
            record = RunRecord(self.root, self._tables)
            if tables:
                self.tables_are_complete = self._tables.advance(record.files, time.monotonic() + READING_S)
            if index:
                self.index_is_complete = self.index.advance(record, time.monotonic() + READING_S)
            yield record


class RunLibrary:
    """The runs in and below some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._roots: dict[str, Path] = {}
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def roots(self) -> dict[str, Path]:
        """The folder of each run by its id, as they are at this moment. Links to folders are not followed."""
        found = {}
        for folder in self.folders:
            own = [folder] if RunRecord(folder).exists else []
            for root in own or run_roots(folder):
                found[id_of(root)] = root
        with self._lock:
            self._roots = found
        return found

    def open(self, id: str) -> OpenRun:
        """The run of an id. Raises NoSuchRun."""
        if id not in self._roots and id not in self.roots():
            raise NoSuchRun(f"there is no run {id} in the folders of this viewer")
        with self._lock:
            run = self._open.get(id) or OpenRun(id, self._roots[id])
            self._open[id] = run
            self._open.move_to_end(id)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            return run

    def read_ahead(self, id: str) -> None:
        """Read the tables of a run in another thread, if nobody asked for it so far: its page is then shown at once."""
        with self._lock:
            is_open = id in self._open
        if not is_open:
            threading.Thread(target=self._read, args=(id,), name="read-ahead", daemon=True).start()

    def _read(self, id: str) -> None:
        with suppress(NoSuchRun, OSError), self.open(id).reading():  # its page says what is wrong with the run
            pass


def id_of(root: Path) -> str:
    """The id of the run in a folder. It is the same each time that a viewer starts."""
    return hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:12]
