"""A heavy field as the driver sees it: who holds the rows, not the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl.types.rows import Rows


@dataclass(frozen=True)
class StoredRows:
    """Some rows of one stored value."""

    owner: str
    """The worker that holds the value."""
    key: str
    """The value's key in the owner's store."""
    rows: tuple[int, ...]


@dataclass(frozen=True)
class RemoteRows(Rows):
    """Rows of a field that stay where they were made (design, section 6).

    The driver may take the length, select rows and concatenate. Reading the data is the callee's business: a handle
    call turns columns into tensors on the worker that it reaches.
    """

    pieces: tuple[StoredRows, ...]

    def __len__(self) -> int:
        return sum(len(piece.rows) for piece in self.pieces)

    def select(self, indices: Sequence[int]) -> RemoteRows:
        """The rows `indices`, in that order; neighbours from one stored value stay one piece."""
        rows = [(piece.owner, piece.key, row) for piece in self.pieces for row in piece.rows]
        return RemoteRows(_pieces(rows[i] for i in indices))

    @staticmethod
    def concat(columns: Sequence[RemoteRows]) -> RemoteRows:
        """All rows of `columns`, in order."""
        return RemoteRows(
            _pieces((piece.owner, piece.key, row) for c in columns for piece in c.pieces for row in piece.rows)
        )


def _pieces(rows) -> tuple[StoredRows, ...]:  # type: ignore[no-untyped-def]
    groups: list[tuple[str, str, list[int]]] = []
    for owner, key, row in rows:
        if groups and groups[-1][:2] == (owner, key):
            groups[-1][2].append(row)
        else:
            groups.append((owner, key, [row]))
    return tuple(StoredRows(owner, key, tuple(members)) for owner, key, members in groups)
