"""Transports of rows between worker processes: through Ray's object store, or over a process group."""

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
    """Calls `read` of the owner's actor, which runs `RowStore.read` in parallel to the owner's present call."""

    def __init__(self, deadline_s: float) -> None:
        """
        Args:
            deadline_s: seconds that an owner may take to answer.
        """
        self.deadline_s = deadline_s
        self.actors: dict[str, Any] = {}

    def fetch(self, wanted: Mapping[str, Sequence[StoredRows]]) -> dict[str, list[RowPayload]]:
        """The rows of the pieces of each owner.

        Raises:
            WorkerError: an owner is dead.
            StallError: an owner does not answer in time.
            LookupError: the rows were released with their step.
        """
        answers = {owner: self._actor(owner).read.remote(list(pieces)) for owner, pieces in wanted.items()}
        end = monotonic() + self.deadline_s
        return {owner: self._answer(owner, answer, end) for owner, answer in answers.items()}

    def _actor(self, owner: str) -> Any:
        """The actor of a worker. Ray knows it by the worker's name."""
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


# Over a process group (gloo, NCCL). Both ends of a message must take part, so the driver plans: it reads from the
# arguments of a call which rows must be sent, has both ends of every move run `exchange`, and then makes the call. Its
# workers find the rows that they received.
#
#     moves = plan_moves(calls, owners)
#     for worker in workers_of(moves):  worker.exchange(moves)
#     for rank, call in zip(...):       worker.call(role, method, *call)


@dataclass(frozen=True)
class Move:
    """Rows that one worker sends to another."""

    owner: str
    reader: str
    pieces: tuple[StoredRows, ...]


def plan_moves(calls: Sequence[Any], readers: Sequence[str]) -> list[Move]:
    """The moves that must precede `calls`, the arguments of each rank, on the workers `readers`."""
    moves = []
    for call, reader in zip(calls, readers, strict=True):
        pieces = dict.fromkeys(piece for each in remote_rows_in(call) for piece in each.stored)
        foreign = by_owner(piece for piece in pieces if piece.owner != reader)
        moves += [Move(owner, reader, tuple(owned)) for owner, owned in foreign.items()]
    return moves


def workers_of(moves: Sequence[Move]) -> list[str]:
    """The workers that send or receive in the moves."""
    return list(dict.fromkeys(worker for move in moves for worker in (move.owner, move.reader)))


class CollectiveTransport:
    """Sends rows over a process group. `fetch` returns rows that the last `exchange` received."""

    def __init__(self, group: ProcessGroup, ranks: Mapping[str, int], wire: torch.device, deadline_s: float) -> None:
        """
        Args:
            group: the process group of all workers that exchange rows.
            ranks: worker name -> rank in the group.
            wire: the device on which the group's backend needs tensors: the CPU for gloo, the rank's GPU for NCCL.
            deadline_s: seconds that one message may take.
        """
        self.group = group
        self.ranks = ranks
        self.wire = wire
        self.deadline_s = deadline_s
        self.arrived: dict[StoredRows, RowPayload] = {}

    def exchange(self, store: RowStore, moves: Sequence[Move]) -> None:
        """Send and receive the rows of `moves`, and keep the received rows for the call that follows.

        Every worker of the moves calls this with the same list. All follow its order, and a sender does not wait for
        its reader. Both ends of the first unfinished move are therefore always working on it: there is no deadlock.
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
        """The rows of each owner's pieces. Each received piece can be fetched once."""
        missing = [piece for pieces in wanted.values() for piece in pieces if piece not in self.arrived]
        if missing:
            raise LookupError(
                f"rows {missing[0].key} of {missing[0].owner} were not sent before the call that reads them"
            )
        return {owner: [self.arrived.pop(piece) for piece in pieces] for owner, pieces in wanted.items()}

    def _channel(self, peer: str, tag: int) -> PeerChannel:
        return PeerChannel(self.group, peer, self.ranks[peer], tag, self.wire, self.deadline_s)


@dataclass(frozen=True)
class PeerChannel:
    """The messages of one move with one peer: the length of the description, the description, each tensor's bytes."""

    group: ProcessGroup
    peer: str
    rank: int
    tag: int
    wire: torch.device
    deadline_s: float

    def send(self, values: Sequence[Any]) -> list[Any]:
        """Start to send values. Returns the pending messages, with the tensors that must live until they are sent."""
        tensors: list[Tensor] = []
        described = json.dumps([[describe(value, tensors), is_on_accelerator(value)] for value in values]).encode()
        description = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        parts = [torch.tensor([len(described)]), description, *tensors]
        return [self._post(tensor) for tensor in parts if tensor.numel()]

    def _post(self, tensor: Tensor) -> tuple[Any, Tensor]:
        flat = as_bytes(tensor.to(self.wire))
        return self.group.send([flat], self.rank, self.tag), flat

    def receive(self) -> list[RowPayload]:
        """Receive the values, in order: on the wire's device if the owner has them on an accelerator, else the CPU."""
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
        """Wait until a message is sent or received."""
        started = monotonic()
        try:
            posted[0].wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:  # raised for broken connections and timeouts alike
            self._fail(error, monotonic() - started)

    def _fail(self, error: RuntimeError, waited_s: float) -> NoReturn:
        if waited_s >= self.deadline_s:
            raise StallError(f"worker {self.peer!r} did not exchange rows within {self.deadline_s:g} s") from error
        raise WorkerError(f"the connection to worker {self.peer!r} broke while rows were exchanged: {error}") from error


DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@singledispatch
def describe(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """A description from which a reader rebuilds a value. The value's tensors are appended to `tensors`."""
    raise TypeError(
        f"a heavy field of type {type(value).__name__} cannot be sent over a process group, only tensors, lists of "
        "plain values and mappings of these. Set row_transport=object_store"
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
