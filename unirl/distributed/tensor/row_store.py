"""Heavy rows stay on the worker that made them. The driver holds RemoteRows; a call fetches the rows that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from unirl.types.batch import compact, concat_rows, in_own_storage, map_value, num_rows, take_rows, tensors_of
from unirl.types.device import CPU, to_host
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.rows import RemoteRows, StoredRows

RowTransportName = Literal["object_store", "collective"]
"""How rows are sent between the workers of Ray."""

T = TypeVar("T")


@dataclass(frozen=True)
class RowPayload:
    """Rows of one stored value, sent to another worker."""

    value: object
    on_accelerator: bool
    """True when the owner keeps them on an accelerator. Then the reader puts them on its device, else on the CPU."""


class RowTransport(Protocol):
    """Fetches rows that other workers own."""

    def fetch(self, pieces: Sequence[StoredRows]) -> list[RowPayload]:
        """The rows of pieces, in the same order."""


class RowStore:
    """The stored values of one worker, by key. A key belongs to a step and is freed with it."""

    def __init__(self, owner: str, transport: RowTransport | None = None, device: torch.device = CPU) -> None:
        """
        Args:
            owner: the worker's name, which is unique in the run.
            transport: fetches the rows of other owners. None: there are no others.
            device: the device on which the worker's roles compute.
        """
        self.owner = owner
        self.transport = transport or InProcessTransport()
        self.device = device
        self.values: dict[str, object] = {}
        self.step = 0
        """The step that values stored from now on belong to."""
        self.num_stored = 0

    def release(self, step: int) -> None:
        """Free everything that belongs to `step`."""
        # The keys are copied to a list first: another thread may be storing.
        for key in [key for key in list(self.values) if key.startswith(f"{step}/")]:
            del self.values[key]

    def fetch(self, value: T, unread: Sequence[str] = ()) -> T:
        """A copy of a call's arguments in which RemoteRows are replaced by the rows themselves.

        Args:
            unread: fields of tracks whose RemoteRows stay as they are.
        """
        rows = self._resolved(remote_rows_in(value, unread))
        return _changed(value, lambda v: rows.get(v, v) if isinstance(v, RemoteRows) else v, lambda tensor: tensor)

    def stash(self, value: T) -> T:
        """A copy of a call's result in which heavy fields are RemoteRows and light tensors are on the CPU."""
        light: list[Tensor] = []

        def collected(tensor: Tensor) -> Tensor:
            light.append(tensor)
            return tensor

        stored = _changed(value, lambda v: v if isinstance(v, RemoteRows) else self.put(v), collected)
        copies = iter(to_host(light))
        return _changed(stored, lambda v: v, lambda tensor: in_own_storage(next(copies)))

    def put(self, value: object) -> RemoteRows:
        """Keep a per-row value on its device, and return RemoteRows for it."""
        key = f"{self.step}/{self.num_stored}"
        self.num_stored += 1
        self.values[key] = compact(value)
        return RemoteRows((StoredRows(self.owner, key, tuple(range(num_rows(value) or 0))),))

    def rows(self, piece: StoredRows) -> object:
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
        """The rows of pieces that are stored here, without the rest of the values that they are part of."""
        return [RowPayload(compact(value), is_on_accelerator(value)) for value in map(self.rows, pieces)]

    def _absent(self, piece: StoredRows) -> str:
        step, number = piece.key.split("/")
        if int(number) < self.num_stored:
            return (
                f"rows {piece.key} of {self.owner} were released with step {step}: read RemoteRows before the end of "
                "the step that made it"
            )
        return f"{self.owner} has never stored rows {piece.key}: they belong to another worker of this name"

    def _resolved(self, remote_rows: Iterable[RemoteRows]) -> dict[RemoteRows, object]:
        distinct = dict.fromkeys(remote_rows)
        pieces = dict.fromkeys(piece for each in distinct for piece in each.stored)
        rows = {piece: self.rows(piece) for piece in pieces if piece.owner == self.owner}
        foreign = [piece for piece in pieces if piece.owner != self.owner]
        if foreign:
            rows |= zip(foreign, map(self._placed, self.transport.fetch(foreign)), strict=True)
        return {each: _joined([rows[piece] for piece in each.stored]) for each in distinct}

    def _placed(self, payload: RowPayload) -> object:
        return map_value(payload.value, lambda t: t.to(self.device)) if payload.on_accelerator else payload.value


class InProcessTransport:
    """Reads the stores of other workers in this process. Nothing is copied."""

    def __init__(self) -> None:
        self.stores: dict[str, RowStore] = {}
        """The store of each worker, by its name."""

    def fetch(self, pieces: Sequence[StoredRows]) -> list[RowPayload]:
        for piece in pieces:
            if piece.owner not in self.stores:
                raise LookupError(f"there is no worker {piece.owner!r}; the workers are {sorted(self.stores)}")
        values = [self.stores[piece.owner].rows(piece) for piece in pieces]
        return [RowPayload(value, is_on_accelerator(value)) for value in values]


def by_owner(pieces: Iterable[StoredRows]) -> dict[str, list[StoredRows]]:
    """The pieces of each owner, in order."""
    owned: dict[str, list[StoredRows]] = {}
    for piece in pieces:
        owned.setdefault(piece.owner, []).append(piece)
    return owned


def remote_rows_in(value: object, unread: Sequence[str] = ()) -> list[RemoteRows]:
    """All RemoteRows in a call's arguments, at any depth, but for those in the fields `unread` of tracks."""
    collected: list[RemoteRows] = []

    def note(leaf: object) -> object:
        if isinstance(leaf, RemoteRows):
            collected.append(leaf)
        return leaf

    _changed(value, note, lambda tensor: tensor)
    skipped = {rows for track in _tracks_in(value) for name in unread for rows in remote_rows_in(vars(track)[name])}
    return [rows for rows in collected if rows not in skipped]


def _tracks_in(value: object) -> list[RolloutTrack]:
    """The tracks in a call's arguments."""
    tracks: list[RolloutTrack] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, RolloutTrack):
            tracks.append(leaf)
        elif isinstance(leaf, RolloutResp):
            tracks += leaf.tracks.values()
    return tracks


def _changed(value: T, heavy: Callable[[object], object], light: Callable[[Tensor], Tensor]) -> T:
    """A copy of a call's arguments or result, with `heavy` applied to heavy fields and `light` to other tensors."""

    def change(part: object) -> object:
        return heavy(part) if isinstance(part, RemoteRows) else map_value(part, light, heavy)

    changed: T = tree_map(change, value)
    return changed


def is_on_accelerator(value: object) -> bool:
    """True when a per-row value has a tensor that is not on the CPU."""
    return any(tensor.device.type != "cpu" for tensor in tensors_of(value))


def _joined(parts: Sequence[object]) -> object:
    if not parts:
        raise ValueError("RemoteRows without rows cannot be read: their type is unknown")
    return parts[0] if len(parts) == 1 else concat_rows(parts)


@dataclass(frozen=True)
class Packed:
    """The memory of a tensor as an array, with its dtype and shape."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as a flat uint8 tensor, which every backend can send."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def pack(value: object) -> object:
    """A per-row value for another process: tensors, alone or in mappings, become arrays; others move to the CPU."""

    def packed(part: object) -> object:
        if isinstance(part, Tensor):
            return Packed(as_bytes(part.detach().cpu()).numpy(), part.dtype, tuple(part.shape))
        return map_value(part, Tensor.cpu)

    return tree_map(packed, value)


def unpack(value: object) -> object:
    """The inverse of `pack`. Tensors are on the CPU."""

    def unpacked(packed: Packed) -> Tensor:
        # Copied, because an array from the object store is read-only and keeps the store's memory in use.
        tensor = torch.empty(packed.shape, dtype=packed.dtype)
        as_bytes(tensor).numpy()[:] = packed.data
        return tensor

    return tree_map_only(Packed, unpacked, value)
