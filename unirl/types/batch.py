"""Containers of samples: a dataclass mix-in whose fields declare how they split and join.

Every field of a `Batch` is made with one of the functions here. Nothing guesses from a leading dimension.

    @dataclass(kw_only=True, eq=False)
    class Images(Batch):
        pixels: Tensor = row(heavy=True)          # [B, 3, H, W]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from functools import singledispatch
from typing import Any, Self

import torch
from torch import Tensor

from unirl.types.rows import RemoteRows, Rows


class Kind(Enum):
    """How a field behaves when batches are joined or split."""

    ROW = "row"
    """One entry per row: a tensor's first dimension, a list, a column, a batch, or a mapping of these."""
    PACKED = "packed"
    """Ragged rows laid end to end (or a mapping of these); the batch's offsets field says where each begins."""
    OFFSETS = "offsets"
    """[B + 1] int64 row boundaries of the packed fields, first entry 0."""
    SHARED = "shared"
    """One value for all rows; must be equal to merge."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    MEAN = "mean"
    """Scalars that merge by this reduction (the mean is weighted by rows)."""


def row(*, heavy: bool = False, optional: bool = False) -> Any:
    """A per-row field. `heavy` fields become columns on the driver; `optional` ones default to None."""
    return _field(Kind.ROW, heavy, optional)


def packed(*, heavy: bool = False, optional: bool = False) -> Any:
    """A ragged field: the rows of all samples laid end to end along dimension 0."""
    return _field(Kind.PACKED, heavy, optional)


def packed_offsets() -> Any:
    """The row boundaries of the packed fields of this batch."""
    return _field(Kind.OFFSETS, False, False)


def shared(*, optional: bool = False, default: Any = dataclasses.MISSING) -> Any:
    """A field with one value for all rows, which must be equal in all parts that are joined."""
    made = _field(Kind.SHARED, False, optional)
    return made if default is dataclasses.MISSING else dataclasses.field(default=default, metadata=made.metadata)


def reduced(kind: str, *, optional: bool = False) -> Any:
    """A scalar that merges by `kind`: sum, max, min or mean."""
    return _field(Kind(kind), False, optional)


def _field(kind: Kind, heavy: bool, optional: bool) -> Any:
    metadata = {"kind": kind, "heavy": heavy}
    if optional:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(metadata=metadata)


class Batch(Rows):
    """Mix-in for dataclasses of samples. Treat instances as values: every method returns a new one."""

    def __post_init__(self) -> None:
        size = None
        for name, value in self._values(Kind.ROW):
            length = num_rows(value)
            if length is None:
                continue
            if size is not None and length != size[1]:
                name_of_class = type(self).__name__
                raise ValueError(
                    f"{name_of_class}.{name} has {length} rows but {name_of_class}.{size[0]} has {size[1]}: "
                    "every per-row field of a batch needs the same number of rows"
                )
            size = (name, length)
        self._check_packed(size)

    def _check_packed(self, size: tuple[str, int] | None) -> None:
        bounds = next((value for _, value in self._values(Kind.OFFSETS)), None)
        if bounds is None:
            return
        if size is not None and len(bounds) - 1 != size[1]:
            raise ValueError(
                f"{type(self).__name__}.{size[0]} has {size[1]} rows but the offsets describe {len(bounds) - 1}"
            )
        for name, value in self._values(Kind.PACKED):
            entries = num_rows(value)
            if entries not in (None, int(bounds[-1])):
                raise ValueError(
                    f"{type(self).__name__}.{name} has {entries} entries but the offsets end at {int(bounds[-1])}"
                )

    @classmethod
    def kinds(cls) -> dict[str, Kind]:
        """The declared kind of every field, by name. A field without one is a bug of the class."""
        kinds = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if "kind" not in field.metadata:
                raise TypeError(
                    f"{cls.__name__}.{field.name} declares no kind: use row(), packed(), shared() or reduced()"
                )
            kinds[field.name] = field.metadata["kind"]
        return kinds

    def _values(self, kind: Kind) -> list[tuple[str, Any]]:
        return [
            (name, self.__dict__[name])
            for name, k in self.kinds().items()
            if k is kind and self.__dict__[name] is not None
        ]

    def __len__(self) -> int:
        for _, value in self._values(Kind.ROW):
            length = num_rows(value)
            if length is not None:
                return length
        for _, value in self._values(Kind.OFFSETS):
            return len(value) - 1
        raise ValueError(f"{type(self).__name__} holds no per-row field, so it has no number of rows")

    def costs(self) -> Tensor | None:
        """[B] int64 how much work each row is beside the others, in tokens; None where all are the same."""
        return None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def select(self, indices: Sequence[int]) -> Self:
        """The rows `indices`, in that order; repeats are allowed."""
        chosen = list(indices)
        changes = {name: take_rows(value, chosen) for name, value in self._values(Kind.ROW)}
        for name, bounds in self._values(Kind.OFFSETS):
            entries, lengths = _entries(bounds, chosen)
            changes[name] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            changes |= {packed_name: _take_entries(value, entries) for packed_name, value in self._values(Kind.PACKED)}
        return self.replace(**changes)

    def slice(self, start: int, stop: int) -> Self:
        """The rows start to stop - 1."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"{type(self).__name__}: rows {start}:{stop} do not lie within 0:{len(self)}")
        return self.select(range(start, stop))

    def repeat_interleave(self, times: int) -> Self:
        """Every row `times` times, copies adjacent."""
        return self.select([i for i in range(len(self)) for _ in range(times)])

    def chunk(self, size: int) -> list[Self]:
        """Consecutive batches of `size` rows; the last may be smaller."""
        return [self.slice(i, min(i + size, len(self))) for i in range(0, len(self), size)]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`, in order. Shared fields must be equal in all of them."""
        if not parts:
            raise ValueError(f"{cls.__name__}.concat needs at least one part")
        return parts[0].replace(**{name: _joined(name, kind, parts) for name, kind in cls.kinds().items()})

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `fn` applied to every tensor of a per-row or packed field."""
        values = self._values(Kind.ROW) + self._values(Kind.PACKED)
        return self.replace(**{name: map_value(value, fn) for name, value in values})

    def to(self, device: torch.device | str) -> Self:
        """A copy with its per-row and packed tensors on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_heavy(self, fn: Callable[[Any], Any]) -> Self:
        """A copy with `fn` applied to the value of every heavy field, at any depth."""
        return self.replace(**self._mapped_heavy(fn))

    def _mapped_heavy(self, fn: Callable[[Any], Any]) -> dict[str, Any]:
        changes = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = self.__dict__[field.name]
            if value is None or field.metadata["kind"] not in (Kind.ROW, Kind.PACKED):
                continue
            changes[field.name] = _map_leaves(value, fn) if field.metadata["heavy"] else map_heavy(value, fn)
        return changes


def _entries(bounds: Tensor, chosen: list[int]) -> tuple[Tensor, Tensor]:
    starts, stops = bounds[:-1][chosen], bounds[1:][chosen]
    ranges = [torch.arange(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]
    return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64), stops - starts


@singledispatch
def _take_entries(value: Any, entries: Tensor) -> Any:
    return take_rows(value, entries.tolist())


def _joined(name: str, kind: Kind, parts: Sequence[Batch]) -> Any:
    values = [part.__dict__[name] for part in parts]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise ValueError(f"{type(parts[0]).__name__}.{name} is absent in some parts and present in others: cannot join")
    if kind in (Kind.ROW, Kind.PACKED):
        return concat_rows(values)
    if kind is Kind.OFFSETS:
        lengths = torch.cat([value.diff() for value in values])
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if kind is Kind.SHARED:
        return _agreed(f"{type(parts[0]).__name__}.{name}", values)
    return _reduce(kind, values, [len(part) for part in parts])


def _agreed(name: str, values: list[Any]) -> Any:
    for value in values[1:]:
        if not same(values[0], value):
            raise ValueError(f"{name} is shared by all rows but its parts disagree: {values[0]!r} and {value!r}")
    return values[0]


def _reduce(kind: Kind, values: list[float], sizes: list[int]) -> float:
    if kind is Kind.MEAN:
        return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
    if kind is Kind.SUM:
        return sum(values)
    return max(values) if kind is Kind.MAX else min(values)


@singledispatch
def num_rows(value: Any) -> int | None:
    """The number of rows of a per-row value; None for an empty mapping."""
    raise TypeError(
        f"{type(value).__name__} is not a per-row value: use a tensor, list, column, batch or mapping of these"
    )


@singledispatch
def take_rows(value: Any, indices: list[int]) -> Any:
    """The rows `indices` of a per-row value."""
    raise TypeError(f"{type(value).__name__} is not a per-row value")


def concat_rows(values: Sequence[Any]) -> Any:
    """The rows of all `values`, which are of one type."""
    return _concat(values[0], values)


@singledispatch
def _concat(first: Any, values: Sequence[Any]) -> Any:
    raise TypeError(f"{type(first).__name__} is not a per-row value")


@singledispatch
def map_value(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`fn` applied to the tensors of a per-row value; other values pass."""
    return value


def compact(value: Any) -> Any:
    """The value with every tensor in storage of its own size: a view keeps alive, and ships, all it is a view of."""
    return map_value(value, _own_storage)


def _own_storage(tensor: Tensor) -> Tensor:
    own = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


@singledispatch
def map_heavy(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` applied to the heavy fields of the batches inside a per-row value; other values pass."""
    return value


@singledispatch
def _map_leaves(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` applied to a heavy value, or to each entry of a mapping of them."""
    return fn(value)


@singledispatch
def same(first: Any, second: Any) -> bool:
    """Whether two shared values are equal."""
    return bool(first == second)


@num_rows.register
def _(value: Tensor) -> int | None:
    return value.shape[0]


@num_rows.register(list)
@num_rows.register(RemoteRows)
@num_rows.register(Batch)
def _(value: Any) -> int | None:
    return len(value)


@num_rows.register(dict)
def _(value: dict[str, Any]) -> int | None:
    sizes = {name: num_rows(v) for name, v in value.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the entries of a per-row mapping differ in length: {sizes}")
    return next(iter(sizes.values()), None)


@take_rows.register
def _(value: Tensor, indices: list[int]) -> Any:
    contiguous = indices == list(range(indices[0], indices[0] + len(indices))) if indices else False
    return value[indices[0] : indices[0] + len(indices)] if contiguous else value[indices]


@take_rows.register(list)
def _(value: list[Any], indices: list[int]) -> Any:
    return [value[i] for i in indices]


@take_rows.register(RemoteRows)
@take_rows.register(Batch)
def _(value: Any, indices: list[int]) -> Any:
    return value.select(indices)


@take_rows.register(dict)
def _(value: dict[str, Any], indices: list[int]) -> Any:
    return {name: take_rows(v, indices) for name, v in value.items()}


@_take_entries.register
def _(value: Tensor, entries: Tensor) -> Any:
    return value[entries]


@_take_entries.register(dict)
def _(value: dict[str, Any], entries: Tensor) -> Any:
    return {name: _take_entries(v, entries) for name, v in value.items()}


@_concat.register
def _(first: Tensor, values: Sequence[Tensor]) -> Any:
    return torch.cat(list(values))


@_concat.register(list)
def _(first: list[Any], values: Sequence[list[Any]]) -> Any:
    return [entry for value in values for entry in value]


@_concat.register(RemoteRows)
@_concat.register(Batch)
def _(first: Any, values: Sequence[Any]) -> Any:
    return type(first).concat(values)


@_concat.register(dict)
def _(first: dict[str, Any], values: Sequence[dict[str, Any]]) -> Any:
    for value in values[1:]:
        if value.keys() != first.keys():
            raise ValueError(
                f"a per-row mapping has entries {sorted(first)} in one part and {sorted(value)} in another"
            )
    return {name: concat_rows([value[name] for value in values]) for name in first}


@map_value.register
def _(value: Tensor, fn: Callable[[Tensor], Tensor]) -> Any:
    return fn(value)


@map_value.register(Batch)
def _(value: Batch, fn: Callable[[Tensor], Tensor]) -> Any:
    return value.map_tensors(fn)


@map_value.register(dict)
def _(value: dict[str, Any], fn: Callable[[Tensor], Tensor]) -> Any:
    return {name: map_value(v, fn) for name, v in value.items()}


@map_heavy.register(Batch)
def _(value: Batch, fn: Callable[[Any], Any]) -> Any:
    return value.map_heavy(fn)


@map_heavy.register(dict)
def _(value: dict[str, Any], fn: Callable[[Any], Any]) -> Any:
    return {name: map_heavy(v, fn) for name, v in value.items()}


@_map_leaves.register(dict)
def _(value: dict[str, Any], fn: Callable[[Any], Any]) -> Any:
    return {name: _map_leaves(v, fn) for name, v in value.items()}


@same.register
def _(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second)
