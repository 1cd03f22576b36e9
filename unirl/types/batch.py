"""`Batch`: the base class of containers of samples, whose fields declare how they are split and joined.

Every field of a `Batch` is made with one of the functions `row`, `packed`, `packed_offsets` and `shared`.
The declaration decides what happens to a field; the shape of its value does not.

    @dataclass(kw_only=True, eq=False)
    class Images(Batch):
        pixels: Tensor = row(heavy=True)          # [B, 3, H, W]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial, singledispatch
from itertools import pairwise
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from unirl.types.device import CPU, to_device, to_host
from unirl.types.rows import Rows

T = TypeVar("T")
Declared = Any
"""The type of a field declaration. A type checker takes the annotation of the field, as with `dataclasses.field`."""
HeavyChange = Callable[[Any], object]
"""A function of the value of a heavy field, whose type depends on the field."""


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


def row(*, heavy: bool = False, optional: bool = False) -> Declared:
    """A field with one entry per row.

    Args:
        heavy: the driver holds the field as `RemoteRows`.
        optional: the field defaults to None.
    """
    return _field(Kind.ROW, heavy, None if optional else dataclasses.MISSING)


def packed(*, heavy: bool = False, optional: bool = False) -> Declared:
    """A field with the rows of all samples concatenated along dimension 0, for rows of different lengths.

    Args:
        heavy, optional: as of `row`.
    """
    return _field(Kind.PACKED, heavy, None if optional else dataclasses.MISSING)


def packed_offsets() -> Declared:
    """The field [B + 1] with the bounds of the rows in the packed fields."""
    return _field(Kind.OFFSETS)


def shared(*, default: object = dataclasses.MISSING) -> Declared:
    """A field with one value for all rows, which must be equal in all batches that are joined."""
    return _field(Kind.SHARED, default=default)


def _field(kind: Kind, heavy: bool = False, default: object = dataclasses.MISSING) -> Declared:
    return dataclasses.field(default=default, metadata={"kind": kind, "heavy": heavy})


class Batch(Rows):
    """Base class for dataclasses of samples. Instances are values: every method returns a new one."""

    def __post_init__(self) -> None:
        own = type(self).__name__
        sizes = {name: size for name, value in self._values(Kind.ROW) if (size := num_rows(value)) is not None}
        for (other, expected), (name, size) in pairwise(sizes.items()):
            if size != expected:
                raise ValueError(
                    f"{own}.{name} has {size} rows but {own}.{other} has {expected}: "
                    "every per-row field of a batch needs the same number of rows"
                )
        for _, bounds in self._values(Kind.OFFSETS):
            rows, end = len(bounds) - 1, int(bounds[-1])
            for name, size in sizes.items():
                if size != rows:
                    raise ValueError(f"{own}.{name} has {size} rows but the offsets describe {rows}")
            for name, value in self._values(Kind.PACKED):
                if (size := num_rows(value)) not in (None, end):
                    raise ValueError(f"{own}.{name} has {size} entries but the offsets end at {end}")

    @classmethod
    @cache
    def kinds(cls) -> dict[str, Kind]:
        """The declared kind of every field, by name. Raises TypeError for a field without one."""
        kinds = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if "kind" not in field.metadata:
                raise TypeError(f"{cls.__name__}.{field.name} has no declared kind: use row(), packed() or shared()")
            kinds[field.name] = field.metadata["kind"]
        return kinds

    def _values(self, kind: Kind) -> list[tuple[str, Any]]:
        """The fields of this kind that are not None, as (name, value)."""
        names = [name for name, declared in self.kinds().items() if declared is kind]
        return [(name, self.__dict__[name]) for name in names if self.__dict__[name] is not None]

    def packed_fields(self) -> dict[str, Any]:
        """The values of the packed fields, by name."""
        return dict(self._values(Kind.PACKED))

    def __len__(self) -> int:
        sizes = [num_rows(value) for _, value in self._values(Kind.ROW)]
        sizes += [len(bounds) - 1 for _, bounds in self._values(Kind.OFFSETS)]
        for size in sizes:
            if size is not None:
                return size
        raise ValueError(f"{type(self).__name__} has no per-row field, so its number of rows is not defined")

    def costs(self) -> Tensor | None:
        """[B] int64 tokens that the network reads for each row; None if they are the same for all rows."""
        return None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def select(self, indices: Sequence[int]) -> Self:
        """The rows `indices`, in that order; repeats are allowed."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        changes = {name: take_rows(value, chosen) for name, value in self._values(Kind.ROW)}
        for name, bounds in self._values(Kind.OFFSETS):
            ranges = [torch.arange(int(bounds[i]), int(bounds[i + 1])) for i in chosen]
            changes[name] = bounds_of([len(entries) for entries in ranges])
            entries = torch.cat([chosen[:0], *ranges])
            changes |= {packed_name: take_rows(value, entries) for packed_name, value in self._values(Kind.PACKED)}
        return self.replace(**changes)

    def slice(self, start: int, stop: int) -> Self:
        """The rows from `start` to `stop` - 1."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"{type(self).__name__}: rows {start}:{stop} do not lie within 0:{len(self)}")
        changes = {name: adjacent_rows(value, start, stop) for name, value in self._values(Kind.ROW)}
        for name, bounds in self._values(Kind.OFFSETS):
            changes[name] = bounds[start : stop + 1] - bounds[start]
            first, end = int(bounds[start]), int(bounds[stop])
            changes |= {each: adjacent_rows(value, first, end) for each, value in self._values(Kind.PACKED)}
        # Minibatches are slices. The fields of a batch fit, so those of a slice do, and are not checked again.
        sliced = object.__new__(type(self))
        sliced.__dict__.update(self.__dict__ | changes)
        return sliced

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

    def map_tensors(self, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> Self:
        """A copy with `fn` applied to every tensor of the per-row and packed fields.

        Heavy fields get `heavy` instead, if it is given: their value, or each entry if it is a mapping.
        """
        changes: dict[str, object] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = self.__dict__[field.name]
            if value is None or field.metadata["kind"] not in (Kind.ROW, Kind.PACKED):
                continue
            if heavy is None or not field.metadata["heavy"]:
                changes[field.name] = map_value(value, fn, heavy)
            elif isinstance(value, dict):
                changes[field.name] = {name: heavy(entry) for name, entry in value.items()}
            else:
                changes[field.name] = heavy(value)
        return self.replace(**changes)

    def to(self, device: torch.device | str) -> Self:
        """A copy with its per-row and packed tensors on `device`.

        A copy to the CPU has arrived when this returns, after one wait for all tensors.
        """
        target = torch.device(device)
        if target != CPU:
            return self.map_tensors(partial(to_device, device=target))
        copies = iter(to_host(tensors_of(self)))
        return self.map_tensors(lambda _: next(copies))


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """[B + 1] int64 bounds of rows of `lengths` in a packed field, for `packed_offsets`."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _joined(name: str, kind: Kind, parts: Sequence[Batch]) -> object:
    values = [part.__dict__[name] for part in parts]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise ValueError(f"{type(parts[0]).__name__}.{name} is None in some of the batches to join and set in others")
    if kind in (Kind.ROW, Kind.PACKED):
        return concat_rows(values)
    if kind is Kind.OFFSETS:
        return bounds_of([length for value in values for length in value.diff().tolist()])
    for value in values[1:]:
        if not same(values[0], value):
            raise ValueError(
                f"{type(parts[0]).__name__}.{name} has one value for all rows, but the batches to join have "
                f"{values[0]!r} and {value!r}"
            )
    return values[0]


# --- per-row values: tensors, lists, remote rows, batches, and mappings of these --------------------------------------


def num_rows(value: object) -> int | None:
    """The number of rows of a per-row value; None for an empty mapping."""
    match value:
        case Tensor() | list() | Rows():
            return len(value)
        case dict():
            sizes = {name: num_rows(entry) for name, entry in value.items()}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"the entries of a per-row mapping differ in length: {sizes}")
            return next(iter(sizes.values()), None)
    raise TypeError(
        f"{type(value).__name__} is not a per-row value: use a tensor, list, RemoteRows, Batch or mapping of these"
    )


def take_rows(value: Any, indices: Sequence[int] | Tensor) -> Any:
    """The rows `indices` of a per-row value, of the same type. Adjacent rows of a tensor are a view."""
    chosen = torch.as_tensor(indices, dtype=torch.int64)
    return _taken(value, chosen, _adjacent(chosen))


def _adjacent(chosen: Tensor) -> slice | None:
    """The slice of all rows `chosen` [n]. None if they are not adjacent rows in their order."""
    count = len(chosen)
    start = int(chosen[0]) if count else 0
    if count and int(chosen[-1]) - start != count - 1:  # most that are not adjacent
        return None
    return slice(start, start + count) if torch.equal(chosen, torch.arange(start, start + count)) else None


def _taken(value: Any, chosen: Tensor, adjacent: slice | None) -> Any:
    match value:
        case Tensor():
            return value[to_device(chosen, value.device) if adjacent is None else adjacent]
        case list() | tuple():
            return [value[i] for i in chosen.tolist()]
        case dict():
            return {name: _taken(entry, chosen, adjacent) for name, entry in value.items()}
    return value.select(chosen.tolist())


def adjacent_rows(value: Any, start: int, stop: int) -> Any:
    """The rows from `start` to `stop` - 1 of a per-row value, of the same type. Those of a tensor are a view."""
    match value:
        case Tensor() | list():
            return value[start:stop]
        case dict():
            return {name: adjacent_rows(entry, start, stop) for name, entry in value.items()}
        case Batch():
            return value.slice(start, stop)
    return value.select(range(start, stop))


def concat_rows(values: Sequence[Any]) -> Any:
    """The rows of all `values`, which are per-row values of one type."""
    first = values[0]
    match first:
        case Tensor():
            return torch.cat(list(values))
        case list():
            return [entry for value in values for entry in value]
        case dict():
            for value in values[1:]:
                if value.keys() != first.keys():
                    raise ValueError(
                        f"a per-row mapping has the entries {sorted(first)} in one part and {sorted(value)} in another"
                    )
            return {name: concat_rows([value[name] for value in values]) for name in first}
    return first.concat(values)


# --- functions applied to the parts of a value ------------------------------------------------------------------------


@singledispatch
def map_value(value: object, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> Any:
    """The value with `fn` applied to its tensors, and `heavy`, if given, to the heavy fields of its batches.

    A value without tensors is returned unchanged.
    """
    return value


@map_value.register
def _(value: Tensor, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> Tensor:
    return fn(value)


@map_value.register(Batch)
def _(value: Batch, fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> Batch:
    return value.map_tensors(fn, heavy)


@map_value.register(dict)
def _(value: dict[str, object], fn: Callable[[Tensor], Tensor], heavy: HeavyChange | None = None) -> dict[str, object]:
    return {name: map_value(entry, fn, heavy) for name, entry in value.items()}


def tensors_of(value: object) -> list[Tensor]:
    """The tensors of a value, at any depth."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_value(value, note)
    return tensors


def named_tensors(value: object, name: str) -> dict[str, Tensor]:
    """The tensors of per-row and packed fields and their bounds, at any depth, as `name.field.entry`.

    Remote rows and values of shared fields are left out.
    """
    match value:
        case Tensor():
            return {name: value}
        case Batch():
            kinds = value.kinds()
            parts = {key: part for key, part in vars(value).items() if kinds.get(key, Kind.SHARED) is not Kind.SHARED}
        case dict():
            parts = value
        case _:
            return {}
    return {
        path: tensor for key, part in parts.items() for path, tensor in named_tensors(part, f"{name}.{key}").items()
    }


def with_named_tensors(value: T, tensors: Mapping[str, Tensor], name: str) -> T:
    """The value with the tensors of `named_tensors` in place of its own tensors and remote rows.

    A field that has no tensor of its name keeps its value.
    """
    changed: Any = tensors.get(name, value)
    match value:
        case Batch():
            kinds = value.kinds()
            parts = {key: part for key, part in vars(value).items() if kinds.get(key, Kind.SHARED) is not Kind.SHARED}
            changed = value.replace(
                **{key: with_named_tensors(part, tensors, f"{name}.{key}") for key, part in parts.items()}
            )
        case dict():
            changed = {key: with_named_tensors(part, tensors, f"{name}.{key}") for key, part in value.items()}
    return cast("T", changed)


def compact(value: T) -> T:
    """The value with every tensor in storage of its own size."""
    compacted: T = map_value(value, in_own_storage)
    return compacted


def in_own_storage(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a view, which keeps, and ships, all of the tensor behind it."""
    own = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


def same(first: object, second: object) -> bool:
    """True if two shared values are equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)
