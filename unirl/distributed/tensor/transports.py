"""Rows from other worker processes through Ray's object store: from worker to worker, never through the driver."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import singledispatch
from math import prod
from time import monotonic
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from unirl.config.errors import StallError, WorkerError
from unirl.distributed.tensor.row_store import (
    CPU,
    RowPayload,
    RowStore,
    as_bytes,
    by_owner,
    is_on_accelerator,
    remote_rows_in,
    unpack,
)
from unirl.types.rows import StoredRows


class RayTransport:
    """Asks the owner's actor, whose `read(pieces)` answers with `RowStore.read` beside the call it is busy with."""

    def __init__(self, deadline_s: float) -> None:
        """
        Args:
            deadline_s: how long an owner may take to answer.
        """
        self.deadline_s = deadline_s
        self.actors: dict[str, Any] = {}

    def fetch(self, wanted: Mapping[str, Sequence[StoredRows]]) -> dict[str, list[RowPayload]]:
        """The rows of the pieces of each owner.

        Raises:
            WorkerError: an owner is dead.
            StallError: an owner does not answer in time.
            LookupError: the step of the rows has been released.
        """
        answers = {owner: self._actor(owner).read.remote(list(pieces)) for owner, pieces in wanted.items()}
        end = monotonic() + self.deadline_s
        return {owner: self._answer(owner, answer, end) for owner, answer in answers.items()}

    def _actor(self, owner: str) -> Any:
        """The actor of a worker, which has the worker's name."""
        import ray

        if owner not in self.actors:
            try:
                self.actors[owner] = ray.get_actor(owner)
            except ValueError as error:
                raise WorkerError(f"worker {owner!r}, which owns rows of this step, is gone: resume the run") from error
        return self.actors[owner]

    def _answer(self, owner: str, answer: Any, end: float) -> list[RowPayload]:
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

        try:
            payloads: list[RowPayload] = ray.get(answer, timeout=max(end - monotonic(), 0.0))
        except GetTimeoutError as error:
            raise StallError(f"worker {owner!r} did not send its rows within {self.deadline_s:g} s") from error
        except (RayActorError, ObjectLostError) as error:
            raise WorkerError(f"worker {owner!r} died before it sent its rows: resume the run ({error})") from error
        except RayTaskError as error:
            raise error.cause from error
        return [RowPayload(unpack(payload.value), payload.on_accelerator) for payload in payloads]


@dataclass(frozen=True)
class Move:
    """Rows that one worker sends and another one reads."""

    owner: str
    reader: str
    pieces: tuple[StoredRows, ...]


def plan_moves(calls: Sequence[Any], readers: Sequence[str]) -> list[Move]:
    """What must move before `calls`, the arguments of each rank, can run on the workers `readers`."""
    moves = []
    for call, reader in zip(calls, readers, strict=True):
        pieces = dict.fromkeys(piece for column in remote_rows_in(call) for piece in column.stored)
        foreign = by_owner(piece for piece in pieces if piece.owner != reader)
        moves += [Move(owner, reader, tuple(owned)) for owner, owned in foreign.items()]
    return moves


def workers_of(moves: Sequence[Move]) -> list[str]:
    """The workers that take part in the moves."""
    return list(dict.fromkeys(worker for move in moves for worker in (move.owner, move.reader)))


class CollectiveTransport:
    """Moves over a process group. Fetching takes what the last exchange brought."""

    def __init__(self, group: ProcessGroup, ranks: Mapping[str, int], wire: torch.device, deadline_s: float) -> None:
        """
        Args:
            group: spans all workers that exchange rows.
            ranks: a worker's rank in the group, by its name.
            wire: where the group's backend wants tensors: the CPU for gloo, the rank's GPU for NCCL.
            deadline_s: how long one message may take.
        """
        self.group = group
        self.ranks = ranks
        self.wire = wire
        self.deadline_s = deadline_s
        self.arrived: dict[StoredRows, RowPayload] = {}

    def exchange(self, store: RowStore, moves: Sequence[Move]) -> None:
        """Send what the moves want of this worker's store and keep what they bring, for the call that follows.

        Every worker of the moves calls this with the same list. All follow its order, and a sender does not wait for
        its reader, so the first move that is not done always has both of its ends at work on it: no deadlock.
        """
        self.arrived.clear()
        sent = []
        for tag, move in enumerate(moves):
            if move.owner == store.owner:
                channel = self._channel(move.reader, tag)
                sent.append((channel, channel.send([store.rows(piece) for piece in move.pieces])))
            elif move.reader == store.owner:
                self.arrived |= zip(move.pieces, self._channel(move.owner, tag).receive(), strict=True)
        for channel, works in sent:
            for work in works:
                channel.wait(work)

    def fetch(self, wanted: Mapping[str, Sequence[StoredRows]]) -> dict[str, list[RowPayload]]:
        """The rows of the pieces of each owner; each move can be read once."""
        missing = [piece for pieces in wanted.values() for piece in pieces if piece not in self.arrived]
        if missing:
            raise LookupError(
                f"rows {missing[0].key} of {missing[0].owner} were not moved before the call that reads them"
            )
        return {owner: [self.arrived.pop(piece) for piece in pieces] for owner, pieces in wanted.items()}

    def _channel(self, peer: str, tag: int) -> PeerChannel:
        return PeerChannel(self.group, peer, self.ranks[peer], tag, self.wire, self.deadline_s)


@dataclass(frozen=True)
class PeerChannel:
    """One move's messages with one peer: the length of the description, the description, and every tensor's bytes."""

    group: ProcessGroup
    peer: str
    rank: int
    tag: int
    wire: torch.device
    deadline_s: float

    def send(self, values: Sequence[Any]) -> list[Any]:
        """Start to send values; what to wait for, with the tensors that must live until then."""
        tensors: list[Tensor] = []
        described = json.dumps([[describe(value, tensors), is_on_accelerator(value)] for value in values]).encode()
        description = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        parts = [torch.tensor([len(described)]), description, *tensors]
        return [self._post(tensor) for tensor in parts if tensor.numel()]

    def _post(self, tensor: Tensor) -> tuple[Any, Tensor]:
        flat = as_bytes(tensor.to(self.wire))
        return self.group.send([flat], self.rank, self.tag), flat

    def receive(self) -> list[RowPayload]:
        """The values, in order, where their owner had them: on the wire's device, or the CPU."""
        length = int(self._read(torch.int64, [1]))
        description = json.loads(bytes(self._read(torch.uint8, [length]).cpu().numpy()))
        return [RowPayload(self._build(value, on_accelerator), on_accelerator) for value, on_accelerator in description]

    def _build(self, described: dict[str, Any], on_accelerator: bool) -> Any:
        if "list" in described:
            return described["list"]
        if "mapping" in described:
            return {name: self._build(value, on_accelerator) for name, value in described["mapping"].items()}
        tensor = self._read(DTYPES[described["dtype"]], described["shape"])
        return tensor if on_accelerator else tensor.to(CPU)

    def _read(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.wire)
        if prod(shape):
            flat = as_bytes(tensor)
            self.wait((self.group.recv([flat], self.rank, self.tag), flat))
        return tensor

    def wait(self, posted: tuple[Any, Tensor]) -> None:
        """Until a message is through."""
        started = monotonic()
        try:
            posted[0].wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:  # all that a broken or late connection raises
            self._fail(error, monotonic() - started)

    def _fail(self, error: RuntimeError, waited_s: float) -> NoReturn:
        if waited_s >= self.deadline_s:
            raise StallError(
                f"worker {self.peer!r} did not take part in a move of rows within {self.deadline_s:g} s"
            ) from error
        raise WorkerError(f"the connection to worker {self.peer!r} broke while rows moved: {error}") from error


DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@singledispatch
def describe(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """What a reader must know to rebuild a value from its tensors, which are added to the list."""
    raise TypeError(
        f"a heavy field of type {type(value).__name__} cannot move over a process group, only tensors, lists of plain "
        "values and mappings of these: let it travel through the object store"
    )


@describe.register
def _(value: Tensor, tensors: list[Tensor]) -> dict[str, Any]:
    tensors.append(value)
    return {"dtype": str(value.dtype), "shape": list(value.shape)}


@describe.register
def _(value: list, tensors: list[Tensor]) -> dict[str, Any]:
    return {"list": value}


@describe.register
def _(value: dict, tensors: list[Tensor]) -> dict[str, Any]:
    return {"mapping": {name: describe(entry, tensors) for name, entry in value.items()}}
