"""Append-only tables with one row per step that survive a crash: an incomplete last line is removed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """A file of one JSON object per line: keys sorted, floats as Python's repr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _drop_half_line(path)
        self._file = open(path, "a", encoding="ascii", newline="\n")  # noqa: SIM115 open for the life of the run

    def append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(row), sort_keys=True, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Makes every row durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """Removes the rows of steps after `step`."""
        self._file.flush()
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in read_rows(self.path) if row["step"] <= step)
        self._file.close()
        replace_text(self.path, text)
        self._file = open(self.path, "a", encoding="ascii", newline="\n")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


class CsvTable:
    """A csv file. When a new column appears, the file is rewritten, and older rows are empty in that column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _drop_half_line(path)
        self._rows = list(self._read())
        self._columns = _columns(self._rows)
        self._file = open(path, "a", encoding="ascii", newline="")  # noqa: SIM115 open for the life of the run

    def append(self, row: Mapping[str, float]) -> None:
        cells = {name: _cell(value) for name, value in row.items()}
        self._rows.append(cells)
        if set(cells) <= set(self._columns):
            self._file.write(_csv_line([cells.get(name, "") for name in self._columns]))
        else:
            self._rewrite()

    def sync(self) -> None:
        """Makes every row durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """Removes the rows of steps after `step`, and columns that only these rows had."""
        self._rows = [row for row in self._rows if int(row["step"]) <= step]
        self._rewrite()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        self._columns = _columns(self._rows)
        lines = [self._columns, *([row.get(name, "") for name in self._columns] for row in self._rows)]
        self._file.close()
        replace_text(self.path, "".join(map(_csv_line, lines)) if self._rows else "")
        self._file = open(self.path, "a", encoding="ascii", newline="")  # noqa: SIM115

    def _read(self) -> Iterator[dict[str, str]]:
        if self.path.exists():
            with open(self.path, encoding="ascii", newline="") as file:
                for row in csv.DictReader(file):
                    yield {name: cell for name, cell in row.items() if cell}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
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


def finite(value: Any) -> Any:
    """`value` with `nan`, `inf` and `-inf` as text, because JSON has no such numbers. `float` reads the text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader, also after a crash, finds either the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _drop_half_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)


def _columns(rows: list[dict[str, str]]) -> list[str]:
    names = {name for row in rows for name in row}
    return ["step", *sorted(names - {"step"})] if rows else []


def _cell(value: float) -> str:
    return repr(value)


def _csv_line(cells: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
