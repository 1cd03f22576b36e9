"""Readers of .txt, .jsonl, .json and .parquet files: each yields the entries of a file with their lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from unirl.config.dependencies import need
from unirl.config.errors import DataError

SHOWN = 100
"""Characters of a bad entry that an error shows."""


PARQUET_ROWS = 64
"""Rows of a parquet file that are unpacked at a time."""
UNPACKED_BYTES = 2**30
MAX_EXPANSION = 100
"""A parquet file may unpack to 1 GiB, or to a hundred times its own size."""


class BadEntry(ValueError):
    """An entry that breaks the rules of its file. The caller adds the file and the line."""

    def __init__(self, message: str, kind: type[DataError] = DataError, line: int | None = None) -> None:
        """The error at a `line` within the entry's source, from 1; None = the whole entry."""
        super().__init__(message)
        self.kind, self.line = kind, line


@dataclass(frozen=True)
class RawEntry:
    """One entry of a data file before it is parsed."""

    line: int
    source: str
    decode: Callable[[], object]
    """Returns the JSON value of the entry. Raises BadEntry."""

    def error(self, file: Path, why: BadEntry) -> DataError:
        """The error of this entry, with file, line and source."""
        line, source = self.line, self.source
        if why.line is not None:
            line, source = line + why.line - 1, source.split("\n")[why.line - 1].strip()
        shown = source if len(source) <= SHOWN else source[:SHOWN] + " ..."
        return why.kind(f"{file}:{line}: {why}\n  source: {shown!a}")


def _absent(file: Path) -> str:
    return (
        f"data file {file} does not exist (looked in {Path.cwd()}). Correct the path; a recipe has it in "
        "data_source.data_path, which many read from DATA_PATH"
    )


def _read_text(file: Path) -> str:
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise DataError(f"data file {file} is a pipe, a socket or a device, which may never end; give a regular file")
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(_absent(file)) from error
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{file}:1: the file is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        bad = data[error.start : error.start + 4]
        raise DataError(f"{file}:{line}: the text is not UTF-8 (bytes {bad.hex(' ')}); save it as UTF-8") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. Only line feeds separate lines; str.splitlines would also split at U+2028."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _txt(file: Path, prompt_key: str) -> Iterator[RawEntry]:
    for number, line in _lines(_read_text(file)):
        yield RawEntry(number, line, partial(_plain, line))


def _plain(line: str) -> str:
    if "\r" in line:
        raise BadEntry("the line contains a carriage return; end lines with LF or CRLF")
    return line


def _jsonl(file: Path, prompt_key: str) -> Iterator[RawEntry]:
    for number, line in _lines(_read_text(file)):
        yield RawEntry(number, line, partial(_object, line, prompt_key))


def _object(line: str, prompt_key: str) -> object:
    value = _decode(line)
    if not isinstance(value, dict):
        raise BadEntry(f'expected one JSON object per line, like {{"{prompt_key}": "..."}}')
    return value


def _json(file: Path, prompt_key: str) -> Iterator[RawEntry]:
    text = _read_text(file)
    if not text.strip():
        return
    whole = RawEntry(1, text, partial(_decode, text))
    try:
        document = whole.decode()
    except BadEntry as error:
        raise whole.error(file, error) from error
    if isinstance(document, dict) and "prompts" not in document:
        yield RawEntry(1, text.strip(), _known(document))
        return
    if isinstance(document, dict) and len(document) > 1:
        others = sorted(set(document) - {"prompts"})
        raise DataError(f"{file}: the keys {others} beside 'prompts' are not read; remove them")
    entries = document["prompts"] if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise DataError(f"{file}: expected {EXPECTED['.json']}, found {json.dumps(document)[:SHOWN]}")
    yield from _entries(text, entries)


def _entries(text: str, entries: list[object]) -> Iterator[RawEntry]:
    """The entries of the list, with the line where each begins. The first bracket of `text` must open the list."""
    decoder = json.JSONDecoder()
    before, line, counted = text.find("["), 1, 0
    for value in entries:
        begin = _skip(text, before + 1)
        line, counted = line + text.count("\n", counted, begin), begin
        _, end = decoder.raw_decode(text, begin)
        yield RawEntry(line, text[begin:end], _known(value))
        before = _skip(text, end)


def _known(value: object) -> Callable[[], object]:
    return lambda: value


def _skip(text: str, at: int) -> int:
    """The next position that has no white space."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _decode(text: str) -> object:
    """The JSON value of `text`. NaN and repeated keys, which Python's decoder accepts, are errors."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BadEntry(f"not valid JSON: {error.msg} (column {error.colno})", line=error.lineno) from error
    except RecursionError as error:
        raise BadEntry("the entry is nested too deeply") from error
    except ValueError as error:
        raise BadEntry(f"not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    repeated = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
    if repeated is not None:
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits} is too large")
    return number


def parquet_rows(file: Path) -> Iterator[dict[str, object]]:
    """The rows of a parquet file, a few at a time.

    A column may store one long text once for all rows, so texts stay as stored until their rows are read, and what all
    rows hold is counted.

    Raises:
        DependencyError: 3001 if pyarrow is not installed.
        DataError: 4002 if the file unpacks to far more than its own size.
    """
    need("pyarrow", extra="data", by=f"data file {file}")
    import pyarrow
    import pyarrow.parquet

    size = file.stat().st_size
    most = max(UNPACKED_BYTES, MAX_EXPANSION * size)
    with pyarrow.parquet.ParquetFile(file) as opened:
        groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
        total = sum(group.total_byte_size for group in groups)
        flat = [field.name for field in opened.schema_arrow if pyarrow.types.is_string(field.type)]
    with pyarrow.parquet.ParquetFile(file, read_dictionary=flat) as opened:
        for batch in opened.iter_batches(batch_size=PARQUET_ROWS) if total <= most else ():
            rows = batch.to_pylist()
            yield from rows
            total += sum(len(value) for row in rows for value in row.values() if isinstance(value, str))
            if total > most:
                break
    if total > most:
        raise DataError(
            f"data file {file} has {size} bytes and unpacks to more than {most}: no list of prompts does. Check where "
            "it comes from, or save it as .jsonl"
        )


def _parquet(file: Path, prompt_key: str) -> Iterator[RawEntry]:
    """The rows, numbered from 1. A row is an object, its columns are the keys, and null means that a key is absent."""
    need("pyarrow", extra="data", by=f"data file {file}")
    import pyarrow

    if not file.is_file():
        raise DataError(_absent(file))
    number = 0
    try:
        for number, row in enumerate(parquet_rows(file), start=1):
            yield RawEntry(number, json.dumps(row, ensure_ascii=False, default=repr), partial(_as_json, row, ""))
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:  # the last one for damaged column names
        reason = str(error).splitlines()[0]
        raise DataError(f"data file {file} cannot be read as parquet after row {number}: {reason}") from error


def _as_json(value: object, at: str) -> object:
    """The value as a JSON file would hold it. Raises BadEntry if JSON has no such value."""
    match value:
        case dict():
            return {key: _as_json(entry, f"{at}.{key}") for key, entry in value.items() if entry is not None}
        case list():
            return [_as_json(entry, f"{at}[{i}]") for i, entry in enumerate(value)]
        case float() if not math.isfinite(value):
            raise BadEntry(f"{at.lstrip('.')} is {value}, which is not a JSON value")
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            raise BadEntry(
                f"{at.lstrip('.')} holds {len(value)} bytes, and a data file may not contain binary data: save "
                "images as files and name them in media_refs"
            )
    raise BadEntry(f"{at.lstrip('.')} is a {type(value).__name__}, which is not a JSON value; write it as text")


Read = Callable[[Path, str], Iterator[RawEntry]]
READERS: dict[str, Read] = {".txt": _txt, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
EXPECTED = {
    ".txt": "one prompt per line",
    ".jsonl": 'one JSON object per line, like {"prompt": "a red circle"}',
    ".parquet": "one row per prompt, with the keys of a JSON object as columns",
    ".json": 'a list of strings or objects, or {"prompts": [...]}, or one object with a prompt',
}
