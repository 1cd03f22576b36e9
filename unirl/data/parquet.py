"""Parquet files as entries: a row is an object, its columns are the keys, a null is a key that is not there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from unirl.config.dependencies import need
from unirl.config.errors import DataError
from unirl.data.entries import Item, attempt, refuse


def parquet_rows(file: Path, prompt_key: str) -> Iterator[Item | DataError]:
    """The rows, numbered from 1. Raises DataError where the file is none; DependencyError without pyarrow."""
    need("pyarrow", extra="data", by=f"data file {file}")
    import pyarrow
    import pyarrow.parquet

    if not file.is_file():
        raise DataError(f"data file {file} does not exist (looked in {Path.cwd()}). Check DATA_PATH")
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield attempt(_row, file, number, row)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"data file {file} cannot be read as parquet after row {number}: {reason}") from error


def _row(file: Path, number: int, row: dict[str, object]) -> Item:
    try:
        value = _as_json(row, "")
    except ValueError as error:
        refuse(file, Item(number, repr(row), row), str(error))
    return Item(number, json.dumps(value, ensure_ascii=False), value)


def _as_json(value: object, at: str) -> object:
    """The value as a JSON file would bring it. Raises ValueError where it has no such form."""
    match value:
        case dict():
            return {key: _as_json(entry, f"{at}.{key}") for key, entry in value.items() if entry is not None}
        case list():
            return [_as_json(entry, f"{at}[{i}]") for i, entry in enumerate(value)]
        case float() if not math.isfinite(value):
            raise ValueError(f"{at.lstrip('.')} is {value}, which is not a JSON value")
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            raise ValueError(
                f"{at.lstrip('.')} holds {len(value)} bytes, and a data file holds none: write pictures as files and "
                "name them in media_refs"
            )
    raise ValueError(f"{at.lstrip('.')} is a {type(value).__name__}, which is not a JSON value; write it as text")
