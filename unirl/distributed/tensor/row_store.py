"""Heavy rows stay on the worker that made them. The driver holds RemoteRows; a call fetches the rows that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from unirl.types.batch import Batch, compact, concat_rows, map_heavy, map_value, num_rows, take_rows
from unirl.types.rollout_resp import RolloutResp
from unirl.types.rows import RemoteRows, StoredRows

RowTransportName = Literal["object_store", "collective"]
"""How rows are sent between the workers of Ray."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RowPayload:
    """Rows of one stored value, sent to another worker."""

    value: Any
    on_accelerator: bool
    """True when the owner keeps them on an accelerator. Then the reader puts them on its device, else on the CPU."""


class RowTransport(Protocol):
    """Fetches rows that other workers own."""

    def fetch(self, wanted: Mapping[str, Sequence[StoredRows]]) -> Mapping[str, Sequence[RowPayload]]:
        """The rows of each owner's pieces, in the same order, with one request per owner, all at once."""
        ...


class RowStore:
    """The stored values of one worker, by key. A key belongs to a step and is freed with it."""

    def __init__(self, owner: str, transport: RowTransport | None = None, device: torch.device = CPU) -> None:
        """
        Args:
            owner: the worker's name, which is unique in the run.
            transport: fetches the rows of other owners.
            device: the device on which the worker's roles compute.
        """
        self.owner = owner
        self.transport = transport
        self.device = device
        self.values: dict[str, Any] = {}
        self.step = 0
        self.num_stored = 0

    def begin(self, step: int) -> None:
        """Values stored from now on belong to `step`."""
        self.step = step

    def release(self, step: int) -> None:
        """Free everything that belongs to `step`."""
        # The keys are copied to a list first: another thread may be storing.
        for key in [key for key in list(self.values) if key.startswith(f"{step}/")]:
            del self.values[key]

    def clear(self) -> None:
        """Free everything."""
        self.values.clear()

    def fetch(self, value: Any) -> Any:
        """A copy of a call's arguments in which RemoteRows are replaced by the rows themselves."""
        rows = self._resolved(remote_rows_in(value))
        return _walk(value, lambda v: rows[v] if isinstance(v, RemoteRows) else v, _unchanged)

    def stash(self, value: Any) -> Any:
        """A copy of a call's result in which heavy fields are RemoteRows and light tensors are on the CPU."""
        return _walk(value, lambda v: v if isinstance(v, RemoteRows) else self.put(v), to_cpu)

    def put(self, value: Any) -> RemoteRows:
        """Keep a per-row value on its device, and return RemoteRows for it."""
        key = f"{self.step}/{self.num_stored}"
        self.num_stored += 1
        self.values[key] = compact(value)
        return RemoteRows((StoredRows(self.owner, key, tuple(range(num_rows(value) or 0))),))

    def rows(self, piece: StoredRows) -> Any:
        """The rows of a piece that is stored here; adjacent rows are a view of the stored value.

        Raises:
            LookupError: its step has been released.
        """
        try:
            stored = self.values[piece.key]
        except KeyError:
            raise LookupError(self._absent(piece)) from None
        return take_rows(stored, list(piece.rows))

    def read(self, pieces: Sequence[StoredRows]) -> list[RowPayload]:
        """The rows of pieces that are stored here, packed for another process."""
        return [RowPayload(pack(compact(value)), is_on_accelerator(value)) for value in map(self.rows, pieces)]

    def _absent(self, piece: StoredRows) -> str:
        step, number = piece.key.split("/")
        if int(number) < self.num_stored:
            return (
                f"rows {piece.key} of {self.owner} were released with step {step}: read RemoteRows before the end of "
                "the step that made it"
            )
        return f"{self.owner} has never stored rows {piece.key}: they belong to another worker of this name"

    def _resolved(self, remote_rows: Iterable[RemoteRows]) -> dict[RemoteRows, Any]:
        distinct = dict.fromkeys(remote_rows)
        pieces = dict.fromkeys(piece for each in distinct for piece in each.stored)
        rows = {piece: self.rows(piece) for piece in pieces if piece.owner == self.owner}
        rows |= self._foreign([piece for piece in pieces if piece.owner != self.owner])
        return {each: _joined([rows[piece] for piece in each.stored]) for each in distinct}

    def _foreign(self, pieces: Sequence[StoredRows]) -> dict[StoredRows, Any]:
        wanted = by_owner(pieces)
        if not wanted:
            return {}
        if self.transport is None:
            raise LookupError(f"{self.owner} needs rows of {', '.join(wanted)} and has no transport to other workers")
        arrived = self.transport.fetch(wanted)
        return {
            piece: self._placed(payload)
            for owner, owned in wanted.items()
            for piece, payload in zip(owned, arrived[owner], strict=True)
        }

    def _placed(self, payload: RowPayload) -> Any:
        return map_value(payload.value, lambda t: t.to(self.device)) if payload.on_accelerator else payload.value


class InProcessTransport:
    """Reads the stores of other workers in this process. Nothing is copied."""

    def __init__(self) -> None:
        self.stores: dict[str, RowStore] = {}

    def add(self, store: RowStore) -> None:
        """Make the values of a store readable for the other workers."""
        self.stores[store.owner] = store

    def fetch(self, wanted: Mapping[str, Sequence[StoredRows]]) -> dict[str, list[RowPayload]]:
        """The rows of the pieces of each owner."""
        return {owner: [self._payload(owner, piece) for piece in pieces] for owner, pieces in wanted.items()}

    def _payload(self, owner: str, piece: StoredRows) -> RowPayload:
        if owner not in self.stores:
            raise LookupError(f"there is no worker {owner!r}; the workers are {sorted(self.stores)}")
        value = self.stores[owner].rows(piece)
        return RowPayload(value, is_on_accelerator(value))


def by_owner(pieces: Iterable[StoredRows]) -> dict[str, list[StoredRows]]:
    """The pieces of each owner, in order."""
    owned: dict[str, list[StoredRows]] = {}
    for piece in pieces:
        owned.setdefault(piece.owner, []).append(piece)
    return owned


def remote_rows_in(value: Any) -> list[RemoteRows]:
    """All RemoteRows in a call's arguments, at any depth."""
    collected: list[RemoteRows] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, RemoteRows):
            collected.append(leaf)
        return leaf

    _walk(value, note, _unchanged)
    return collected


def to_cpu(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in storage of its own size."""
    return compact(tensor.cpu())


def is_on_accelerator(value: Any) -> bool:
    """True when a per-row value has a tensor that is not on the CPU."""
    devices: set[str] = set()

    def note(tensor: Tensor) -> Tensor:
        devices.add(tensor.device.type)
        return tensor

    map_value(value, note)
    return bool(devices - {"cpu"})


def _joined(parts: Sequence[Any]) -> Any:
    if not parts:
        raise ValueError("RemoteRows without rows cannot be read: their type is unknown")
    return parts[0] if len(parts) == 1 else concat_rows(parts)


def _unchanged(value: Any) -> Any:
    return value


Change = Callable[[Any], Any]


@singledispatch
def _walk(value: Any, heavy: Change, light: Change) -> Any:
    """A copy of a call's arguments or result, with `heavy` applied to heavy fields and `light` to other tensors."""
    return map_value(value, light)


@_walk.register(Batch)
@_walk.register(RolloutResp)
def _(value: Any, heavy: Change, light: Change) -> Any:
    # Heavy fields first: once they are RemoteRows, `light` leaves them alone.
    return map_value(map_heavy(value, heavy), light)


@_walk.register
def _(value: RemoteRows, heavy: Change, light: Change) -> Any:
    return heavy(value)


@_walk.register(tuple)
@_walk.register(list)
def _(value: Any, heavy: Change, light: Change) -> Any:
    return type(value)(_walk(v, heavy, light) for v in value)


@_walk.register
def _(value: dict, heavy: Change, light: Change) -> Any:
    return {name: _walk(v, heavy, light) for name, v in value.items()}


@dataclass(frozen=True)
class Packed:
    """The memory of a tensor as an array, with its dtype and shape."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as a flat uint8 tensor, which every backend can send."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@singledispatch
def pack(value: Any) -> Any:
    """A per-row value for another process: tensors, alone or in mappings, become arrays; others move to the CPU."""
    return map_value(value, Tensor.cpu)


@pack.register
def _(value: Tensor) -> Packed:
    return Packed(as_bytes(value.detach().cpu()).numpy(), value.dtype, tuple(value.shape))


@pack.register
def _(value: dict) -> Any:
    return {name: pack(entry) for name, entry in value.items()}


@singledispatch
def unpack(value: Any) -> Any:
    """The inverse of `pack`. Tensors are on the CPU."""
    return value


@unpack.register
def _(value: Packed) -> Tensor:
    # Copied, because an array from the object store is read-only and keeps the store's memory in use.
    tensor = torch.empty(value.shape, dtype=value.dtype)
    as_bytes(tensor).numpy()[:] = value.data
    return tensor


@unpack.register
def _(value: dict) -> Any:
    return {name: unpack(entry) for name, entry in value.items()}
