"""Append-only tables with one row per step that survive a crash: an incomplete last line is removed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from unirl.types.secrets import without_values

Row = dict[str, Any]
"""A JSON object that was read from a file."""


class _Table:
    """A text file to which rows are appended for the life of the run.

    An earlier file is replaced by a copy of its complete lines: a crash may have left half a line, and a process that
    was paused while this one took the run over keeps appending to the earlier file, which nobody reads any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        complete = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        replace_text(path, b"".join(complete[:2]).decode("ascii", "replace"))
        self._open()

    def sync(self) -> None:
        """Makes every row durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "a", encoding="ascii", newline="")  # noqa: SIM115 open for the life of the run

    def _replace(self, text: str) -> None:
        """Replaces the whole file by `text`."""
        self._file.close()
        replace_text(self.path, text)
        self._open()


class JsonLines(_Table):
    """A file of one JSON object per line: keys sorted, floats as Python's repr."""

    def append(self, row: Mapping[str, object]) -> None:
        self._file.write(without_values(json.dumps(finite(row), sort_keys=True, allow_nan=False)) + "\n")

    def cut(self, step: int) -> None:
        """Removes the rows of steps after `step`."""
        self._file.flush()
        rows = [row for row in read_rows(self.path) if row["step"] <= step]
        self._replace("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


class CsvTable(_Table):
    """A csv file. When a new column appears, the file is rewritten, and older rows are empty in that column."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with open(path, encoding="ascii", newline="") as file:
            self._rows = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
        self._columns = _columns(self._rows)

    def append(self, row: Mapping[str, float]) -> None:
        cells = {name: repr(value) for name, value in row.items()}
        self._rows.append(cells)
        if set(cells) <= set(self._columns):
            self._writer(self._file).writerow(cells)
        else:
            self._rewrite()

    def cut(self, step: int) -> None:
        """Removes the rows of steps after `step`, and columns that only these rows had."""
        self._rows = [row for row in self._rows if int(row["step"]) <= step]
        self._rewrite()

    def _rewrite(self) -> None:
        self._columns = _columns(self._rows)
        text = io.StringIO()
        if self._rows:
            self._writer(text).writeheader()
            self._writer(text).writerows(self._rows)
        self._replace(text.getvalue())

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, lineterminator="\n")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON-lines file, up to the first line that a crash left incomplete."""
    if not path.exists():
        return
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                return
            if not line.endswith("\n") or not isinstance(row, dict):
                return
            yield row


def finite(value: object) -> object:
    """`value` with `nan`, `inf` and `-inf` as text, because JSON has no such numbers. `float` reads the text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (str, int)):  # the check against Mapping is slow, and pieces of texts are many
        return value
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader, also after a crash, finds either the old text or the new one.

    Values that are known to be secret are masked in every file that is written here, and in every table.
    """
    text = without_values(text)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _columns(rows: list[dict[str, str]]) -> list[str]:
    names = {name for row in rows for name in row}
    return ["step", *sorted(names - {"step"})] if rows else []
