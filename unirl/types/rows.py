"""Anything that has rows, and the handle to rows that another worker holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class Rows(ABC):
    """Samples, one per row. A remote call that is scattered over ranks splits arguments of this type and no others."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Self:
        """The rows `indices`, in that order; repeats are allowed."""


@dataclass(frozen=True)
class StoredRows:
    """Some rows of one value in the store of a worker."""

    owner: str
    """Name of the worker that holds the value."""
    key: str
    """Key of the value in the owner's store."""
    rows: tuple[int, ...]


@dataclass(frozen=True)
class RemoteRows(Rows):
    """Handle to the rows of a heavy field, which stay on the workers that made them.

    The driver may take the length, select rows and concatenate. A remote call turns the handle into tensors on the
    worker that executes it.
    """

    stored: tuple[StoredRows, ...]

    def __len__(self) -> int:
        return sum(len(stored.rows) for stored in self.stored)

    def select(self, indices: Sequence[int]) -> RemoteRows:
        """The rows `indices`, in that order. Adjacent rows of one stored value share one `StoredRows`."""
        rows = list(self._single_rows())
        return RemoteRows(_grouped(rows[i] for i in indices))

    @staticmethod
    def concat(parts: Sequence[RemoteRows]) -> RemoteRows:
        """All rows of `parts`, in order."""
        return RemoteRows(_grouped(row for part in parts for row in part._single_rows()))

    def _single_rows(self) -> Iterable[tuple[str, str, int]]:
        """(owner, key, row) of each row."""
        return ((stored.owner, stored.key, row) for stored in self.stored for row in stored.rows)


def rows_by_key(keys: Iterable[KeyT]) -> dict[KeyT, list[int]]:
    """The row numbers of each key, keys in order of appearance."""
    rows: dict[KeyT, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


def _grouped(rows: Iterable[tuple[str, str, int]]) -> tuple[StoredRows, ...]:
    """Adjacent (owner, key, row) with the same owner and key as one `StoredRows`."""
    groups = groupby(rows, key=lambda row: row[:2])
    return tuple(StoredRows(owner, key, tuple(row for _, _, row in members)) for (owner, key), members in groups)


def spread_rows(group_ids: Sequence[str], count: int) -> list[int]:
    """At most `count` row numbers in rising order: the first rows of each group, with equal numbers where possible."""
    ranked = sorted((rank, row) for rows in rows_by_key(group_ids).values() for rank, row in enumerate(rows))
    return sorted(row for _, row in ranked[:count])
