"""Heavy fields stay where they were made; the driver holds columns. The in-process transport."""

from __future__ import annotations

from functools import singledispatchmethod
from itertools import count
from typing import Any

from unirl.types.batch import Batch, concat_rows, map_heavy, num_rows, take_rows
from unirl.types.column import Column, Piece
from unirl.types.rollout_resp import RolloutResp


class ColumnStore:
    """Stored values by key. Keys belong to a step and are freed with it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.step = 0
        self.numbers = count()

    def begin(self, step: int) -> None:
        """Values stored from here on belong to `step`."""
        self.step = step

    def put(self, value: Any, owner: str) -> Column:
        """Keep a per-row value and give the column of its rows."""
        key = f"{self.step}/{next(self.numbers)}"
        self.values[key] = value
        return Column((Piece(owner, key, tuple(range(num_rows(value) or 0))),))

    def get(self, column: Column) -> Any:
        """The rows of a column."""
        return concat_rows([take_rows(self.values[piece.key], list(piece.rows)) for piece in column.pieces])

    def release(self, step: int) -> None:
        """Free everything that belongs to `step`."""
        self.values = {key: value for key, value in self.values.items() if not key.startswith(f"{step}/")}

    def clear(self) -> None:
        """Free everything."""
        self.values.clear()

    def fetch(self, value: Any) -> Any:
        """A copy of a call's arguments with columns replaced by their rows."""
        return self._walk(value, lambda v: self.get(v) if type(v) is Column else v)

    def stash(self, value: Any, owner: str) -> Any:
        """A copy of a call's result with heavy fields replaced by columns."""
        return self._walk(value, lambda v: v if type(v) is Column else self.put(v, owner))

    @singledispatchmethod
    def _walk(self, value: Any, fn: Any) -> Any:
        return value

    @_walk.register(Batch)
    @_walk.register(RolloutResp)
    def _(self, value: Any, fn: Any) -> Any:
        return map_heavy(value, fn)

    @_walk.register(tuple)
    def _(self, value: tuple[Any, ...], fn: Any) -> Any:
        return tuple(self._walk(v, fn) for v in value)

    @_walk.register(dict)
    def _(self, value: dict[str, Any], fn: Any) -> Any:
        return {name: self._walk(v, fn) for name, v in value.items()}
