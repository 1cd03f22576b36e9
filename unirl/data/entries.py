"""Entries of data files before they are judged, and how one is refused: by file, line and text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

from unirl.config.errors import DataError

P = ParamSpec("P")
T = TypeVar("T")
SHOWN = 100
"""How many characters of an offending entry are shown."""


@dataclass(frozen=True)
class Item:
    """One entry of a data file: where it stands, how it is written, and its value as JSON has it."""

    line: int
    source: str
    value: object


def refuse(file: Path, item: Item, why: str, kind: type[DataError] = DataError) -> NoReturn:
    """Raises DataError."""
    source = item.source if len(item.source) <= SHOWN else item.source[:SHOWN] + " ..."
    raise kind(f"{file}:{item.line}: {why}\n  found: {source!a}")


def attempt(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | DataError:
    """What `make` gives, or why it refuses."""
    try:
        return make(*args, **kwargs)
    except DataError as error:
        return error
