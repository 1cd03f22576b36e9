"""`Batch`: the base class of containers of samples, whose fields declare how they are split and joined.

Every field of a `Batch` is made with one of the functions `row`, `packed`, `packed_offsets`, `shared` and `reduced`.
The declaration decides what happens to a field; the shape of its value does not.

    @dataclass(kw_only=True, eq=False)
    class Images(Batch):
        pixels: Tensor = row(heavy=True)          # [B, 3, H, W]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Sized
from enum import Enum
from functools import singledispatch
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from unirl.types.rows import RemoteRows, Rows

T = TypeVar("T")


class Kind(Enum):
    """How a field behaves when batches are split or joined."""

    ROW = "row"
    """One entry per row: the first dimension of a tensor, a list, remote rows, a batch, or a mapping of these."""
    PACKED = "packed"
    """Rows of different lengths, concatenated along dimension 0. The offsets field of the batch has their bounds."""
    OFFSETS = "offsets"
    """[B + 1] int64 bounds of the rows in the packed fields; the first entry is 0."""
    SHARED = "shared"
    """One value for all rows. Batches can be joined only if their values are equal."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    MEAN = "mean"
    """Scalars that are joined by this reduction. The mean is weighted by the number of rows."""


def row(*, heavy: bool = False, optional: bool = False) -> Any:
    """A field with one entry per row.

    Args:
        heavy: the driver holds the field as `RemoteRows`.
        optional: the field defaults to None.
    """
    return _field(Kind.ROW, heavy, optional)


def packed(*, heavy: bool = False, optional: bool = False) -> Any:
    """A field with the rows of all samples concatenated along dimension 0, for rows of different lengths."""
    return _field(Kind.PACKED, heavy, optional)


def packed_offsets() -> Any:
    """The field [B + 1] with the bounds of the rows in the packed fields."""
    return _field(Kind.OFFSETS, False, False)


def shared(*, optional: bool = False, default: Any = dataclasses.MISSING) -> Any:
    """A field with one value for all rows, which must be equal in all batches that are joined."""
    field = _field(Kind.SHARED, False, optional)
    return field if default is dataclasses.MISSING else dataclasses.field(default=default, metadata=field.metadata)


def reduced(kind: str, *, optional: bool = False) -> Any:
    """A scalar field that is joined by the reduction `kind`: sum, max, min or mean."""
    return _field(Kind(kind), False, optional)


def _field(kind: Kind, heavy: bool, optional: bool) -> Any:
    metadata = {"kind": kind, "heavy": heavy}
    if optional:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(metadata=metadata)


class Batch(Rows):
    """Base class for dataclasses of samples. Instances are values: every method returns a new one."""

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
        """The declared kind of every field, by name. Raises TypeError for a field without one."""
        kinds = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if "kind" not in field.metadata:
                raise TypeError(
                    f"{cls.__name__}.{field.name} has no declared kind: use row(), packed(), shared() or reduced()"
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
        raise ValueError(f"{type(self).__name__} has no per-row field, so its number of rows is not defined")

    def costs(self) -> Tensor | None:
        """[B] int64 tokens that the network reads for each row; None if they are the same for all rows."""
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
        """The rows from `start` to `stop` - 1."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"{type(self).__name__}: rows {start}:{stop} do not lie within 0:{len(self)}")
        return self.select(range(start, stop))

    def repeat_interleave(self, times: int) -> Self:
        """Every row repeated `times` times, with the copies adjacent."""
        return self.select([i for i in range(len(self)) for _ in range(times)])

    def chunk(self, size: int) -> list[Self]:
        """Consecutive batches of `size` rows; the last one may be smaller."""
        return [self.slice(i, min(i + size, len(self))) for i in range(0, len(self), size)]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`, in order. Raises ValueError if a shared field differs between them."""
        if not parts:
            raise ValueError(f"{cls.__name__}.concat needs at least one batch")
        return parts[0].replace(**{name: _joined(name, kind, parts) for name, kind in cls.kinds().items()})

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `fn` applied to every tensor of the per-row and packed fields."""
        values = self._values(Kind.ROW) + self._values(Kind.PACKED)
        return self.replace(**{name: map_value(value, fn) for name, value in values})

    def to(self, device: torch.device | str) -> Self:
        """A copy with its per-row and packed tensors on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_heavy(self, fn: Callable[[Any], Any]) -> Self:
        """A copy with `fn` applied to every heavy field, including those of nested batches."""
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


def _joined(name: str, kind: Kind, parts: Sequence[Batch]) -> Any:
    values = [part.__dict__[name] for part in parts]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise ValueError(f"{type(parts[0]).__name__}.{name} is None in some of the batches to join and set in others")
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
            raise ValueError(
                f"{name} has one value for all rows, but the batches to join have {values[0]!r} and {value!r}"
            )
    return values[0]


def _reduce(kind: Kind, values: list[float], sizes: list[int]) -> float:
    if kind is Kind.MEAN:
        return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
    if kind is Kind.SUM:
        return sum(values)
    return max(values) if kind is Kind.MAX else min(values)


# --- per-row values: tensors, lists, remote rows, batches, and mappings of these --------------------------------------


@singledispatch
def num_rows(value: object) -> int | None:
    """The number of rows of a per-row value; None for an empty mapping."""
    raise _not_per_row(value)


@num_rows.register
def _(value: Tensor) -> int | None:
    return value.shape[0]


@num_rows.register(list)
@num_rows.register(RemoteRows)
@num_rows.register(Batch)
def _(value: Sized) -> int | None:
    return len(value)


@num_rows.register(dict)
def _(value: dict[str, object]) -> int | None:
    sizes = {name: num_rows(entry) for name, entry in value.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the entries of a per-row mapping differ in length: {sizes}")
    return next(iter(sizes.values()), None)


@singledispatch
def take_rows(value: object, indices: list[int]) -> Any:
    """The rows `indices` of a per-row value, which is of the same type."""
    raise _not_per_row(value)


@take_rows.register
def _(value: Tensor, indices: list[int]) -> Tensor:
    contiguous = indices == list(range(indices[0], indices[0] + len(indices))) if indices else False
    return value[indices[0] : indices[0] + len(indices)] if contiguous else value[indices]


@take_rows.register(list)
def _(value: list[object], indices: list[int]) -> list[object]:
    return [value[i] for i in indices]


@take_rows.register(RemoteRows)
@take_rows.register(Batch)
def _(value: Rows, indices: list[int]) -> Rows:
    return value.select(indices)


@take_rows.register(dict)
def _(value: dict[str, object], indices: list[int]) -> dict[str, object]:
    return {name: take_rows(entry, indices) for name, entry in value.items()}


@singledispatch
def _take_entries(value: object, entries: Tensor) -> Any:
    """The entries of a packed value, along dimension 0."""
    return take_rows(value, entries.tolist())


@_take_entries.register
def _(value: Tensor, entries: Tensor) -> Tensor:
    return value[entries]


@_take_entries.register(dict)
def _(value: dict[str, object], entries: Tensor) -> dict[str, object]:
    return {name: _take_entries(entry, entries) for name, entry in value.items()}


def concat_rows(values: Sequence[T]) -> T:
    """The rows of all `values`, which are per-row values of one type."""
    joined: T = _concat(values[0], values)
    return joined


@singledispatch
def _concat(first: object, values: Sequence[object]) -> Any:
    raise _not_per_row(first)


@_concat.register
def _(first: Tensor, values: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(values))


@_concat.register(list)
def _(first: list[object], values: Sequence[list[object]]) -> list[object]:
    return [entry for value in values for entry in value]


@_concat.register(RemoteRows)
@_concat.register(Batch)
def _(first: RemoteRows | Batch, values: Sequence[Any]) -> RemoteRows | Batch:
    return type(first).concat(values)


@_concat.register(dict)
def _(first: dict[str, object], values: Sequence[dict[str, object]]) -> dict[str, object]:
    for value in values[1:]:
        if value.keys() != first.keys():
            raise ValueError(
                f"a per-row mapping has the entries {sorted(first)} in one part and {sorted(value)} in another"
            )
    return {name: concat_rows([value[name] for value in values]) for name in first}


def _not_per_row(value: object) -> TypeError:
    return TypeError(
        f"{type(value).__name__} is not a per-row value: use a tensor, list, RemoteRows, Batch or mapping of these"
    )


# --- functions applied to the parts of a value ------------------------------------------------------------------------


@singledispatch
def map_value(value: object, fn: Callable[[Tensor], Tensor]) -> Any:
    """The value with `fn` applied to its tensors. A value without tensors is returned unchanged."""
    return value


@map_value.register
def _(value: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    return fn(value)


@map_value.register(Batch)
def _(value: Batch, fn: Callable[[Tensor], Tensor]) -> Batch:
    return value.map_tensors(fn)


@map_value.register(dict)
def _(value: dict[str, object], fn: Callable[[Tensor], Tensor]) -> dict[str, object]:
    return {name: map_value(entry, fn) for name, entry in value.items()}


def compact(value: T) -> T:
    """The value with every tensor in storage of its own size. A view keeps, and ships, all of the tensor behind it."""
    compacted: T = map_value(value, _own_storage)
    return compacted


def _own_storage(tensor: Tensor) -> Tensor:
    own = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


@singledispatch
def map_heavy(value: object, fn: Callable[[Any], Any]) -> Any:
    """The value with `fn` applied to the heavy fields of the batches inside it. Other values are returned unchanged."""
    return value


@map_heavy.register(Batch)
def _(value: Batch, fn: Callable[[Any], Any]) -> Batch:
    return value.map_heavy(fn)


@map_heavy.register(dict)
def _(value: dict[str, object], fn: Callable[[Any], Any]) -> dict[str, object]:
    return {name: map_heavy(entry, fn) for name, entry in value.items()}


@singledispatch
def _map_leaves(value: object, fn: Callable[[Any], Any]) -> Any:
    """`fn` applied to the value of a heavy field, or to each entry if it is a mapping."""
    return fn(value)


@_map_leaves.register(dict)
def _(value: dict[str, object], fn: Callable[[Any], Any]) -> dict[str, object]:
    return {name: _map_leaves(entry, fn) for name, entry in value.items()}


@singledispatch
def same(first: object, second: object) -> bool:
    """True if two shared values are equal."""
    return bool(first == second)


@same.register
def _(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second)
