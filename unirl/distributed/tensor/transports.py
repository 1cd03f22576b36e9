"""Transports of rows between worker processes: by request of the reader, or over a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from io import BytesIO
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map_only

from unirl.config.errors import LostWorkerError, StallError
from unirl.distributed.tensor.row_store import (
    CPU,
    RowPayload,
    RowStore,
    as_bytes,
    by_owner,
    is_on_accelerator,
    pack,
    remote_rows_in,
    unpack,
)
from unirl.types.rows import StoredRows

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


class RowCarrier(Protocol):
    """Takes rows from the worker that owns them to the worker that reads them. Each has a carrier of the same kind."""

    def send(self, payloads: Sequence[RowPayload]) -> object:
        """A message, which the owner sends to the reader in an answer of its actor."""

    def receive(self, message: object) -> list[RowPayload]:
        """The rows of a message, in order."""


class ObjectStoreCarrier:
    """The message is the rows themselves. Ray moves large answers through its object store."""

    def send(self, payloads: Sequence[RowPayload]) -> object:
        return [RowPayload(pack(payload.value), payload.on_accelerator) for payload in payloads]

    def receive(self, message: object) -> list[RowPayload]:
        assert isinstance(message, list)
        return [RowPayload(unpack(payload.value), payload.on_accelerator) for payload in message]


class RowConnection(Protocol):
    """What a worker needs to take part in a service that carries rows. It is sent to every worker."""

    def carrier(self, worker: str, host: str, deadline_s: float) -> RowCarrier:
        """The carrier of a worker.

        Args:
            host: the address of the worker's machine for other workers.
            deadline_s: seconds that a call of the service may take.
        """


class RowService(Protocol):
    """A service beside the workers that carries rows, as a recipe chooses it."""

    @property
    def num_slots(self) -> int:
        """CPU slots of the Ray cluster that it takes, beside those of the workers."""

    def start(self, num_devices: int) -> RowConnection:
        """Start what runs beside the workers of the pool, or check that it runs."""

    def stop(self) -> None:
        """End what `start` started."""


class RayTransport:
    """Calls `read` of the owner's actor, which runs beside the present call of the owner, and unpacks the message."""

    def __init__(self, deadline_s: float, carrier: RowCarrier) -> None:
        """
        Args:
            deadline_s: seconds that an owner may take to answer.
            carrier: unpacks what the owner's carrier sent.
        """
        self.deadline_s = deadline_s
        self.carrier = carrier
        self.actors: dict[str, ActorHandle] = {}

    def fetch(self, pieces: Sequence[StoredRows]) -> list[RowPayload]:
        """The rows of pieces, with one request per owner, all at once.

        Raises:
            LostWorkerError: an owner is dead.
            StallError: an owner does not answer in time.
            LookupError: the rows were released with their step.
        """
        owned = by_owner(pieces)
        answers = {owner: self._actor(owner).read.remote(owned[owner]) for owner in owned}
        end = monotonic() + self.deadline_s
        payloads: dict[StoredRows, RowPayload] = {}
        for owner, answer in answers.items():
            payloads |= zip(owned[owner], self._answer(owner, answer, end), strict=True)
        return [payloads[piece] for piece in pieces]

    def _actor(self, owner: str) -> ActorHandle:
        """The actor of a worker. Ray knows it by the worker's name."""
        import ray

        if owner not in self.actors:
            try:
                self.actors[owner] = ray.get_actor(owner)
            except ValueError as error:
                raise LostWorkerError(
                    f"worker {owner!r}, which owns rows of this step, is gone: resume the run"
                ) from error
        return self.actors[owner]

    def _answer(self, owner: str, answer: ObjectRef, end: float) -> list[RowPayload]:
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

        try:
            message: object = ray.get(answer, timeout=max(end - monotonic(), 0.0))
        except GetTimeoutError as error:
            raise StallError(f"worker {owner!r} did not send its rows within {self.deadline_s:g} s") from error
        except (RayActorError, ObjectLostError) as error:
            raise LostWorkerError(f"worker {owner!r} died before it sent its rows: resume the run ({error})") from error
        except RayTaskError as error:
            raise error.cause from error
        return self.carrier.receive(message)


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


def plan_moves(calls: Sequence[object], readers: Sequence[str], unread: Sequence[str] = ()) -> list[Move]:
    """The moves that must precede `calls`, the arguments of each rank, on the workers `readers`.

    Args:
        unread: fields of tracks that the call does not read.
    """
    moves = []
    for call, reader in zip(calls, readers, strict=True):
        pieces = dict.fromkeys(piece for each in remote_rows_in(call, unread) for piece in each.stored)
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
                sent += self._send(move.reader, tag, [store.rows(piece) for piece in move.pieces])
            elif move.reader == store.owner:
                self.arrived |= zip(move.pieces, self._receive(move.owner, tag), strict=True)
        for peer, work, _ in sent:
            self._wait(peer, work)

    def fetch(self, pieces: Sequence[StoredRows]) -> list[RowPayload]:
        """The rows of pieces. Each received piece can be fetched once."""
        missing = [piece for piece in pieces if piece not in self.arrived]
        if missing:
            raise LookupError(
                f"rows {missing[0].key} of {missing[0].owner} were not sent before the call that reads them"
            )
        return [self.arrived.pop(piece) for piece in pieces]

    # The messages of one move: the length of the description, the description, each tensor's bytes.

    def _send(self, peer: str, tag: int, values: Sequence[object]) -> list[tuple[str, Work, Tensor]]:
        """Start to send values. Returns the pending messages, with the tensors that must live until they are sent."""
        stream = BytesIO()
        torch.save([(describe(value), is_on_accelerator(value)) for value in values], stream)
        description = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        parts = [torch.tensor([len(description)]), description, *tensors]
        flat = [as_bytes(tensor.to(self.wire)) for tensor in parts if tensor.numel()]
        return [(peer, self.group.send([part], self.ranks[peer], tag), part) for part in flat]

    def _receive(self, peer: str, tag: int) -> list[RowPayload]:
        """Receive the values, in order: on the wire's device if the owner has them on an accelerator, else the CPU."""
        read = partial(self._read, peer, tag)
        length = int(read(CPU, torch.empty(1, dtype=torch.int64)))
        description = read(CPU, torch.empty(length, dtype=torch.uint8)).numpy()
        described = torch.load(BytesIO(description.tobytes()), weights_only=True)
        devices = {True: self.wire, False: CPU}
        return [
            RowPayload(tree_map_only(Tensor, partial(read, devices[on_accelerator]), value), on_accelerator)
            for value, on_accelerator in described
        ]

    def _read(self, peer: str, tag: int, device: torch.device, like: Tensor) -> Tensor:
        """The next tensor of a move, on `device`. It has the shape and dtype of `like`."""
        tensor = torch.empty_like(like, device=self.wire)
        if tensor.numel():
            self._wait(peer, self.group.recv([as_bytes(tensor)], self.ranks[peer], tag))
        return tensor.to(device)

    def _wait(self, peer: str, work: Work) -> None:
        """Wait until a message is sent or received."""
        started = monotonic()
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:  # raised for broken connections and timeouts alike
            if monotonic() - started >= self.deadline_s:
                raise StallError(f"worker {peer!r} did not exchange rows within {self.deadline_s:g} s") from error
            raise LostWorkerError(
                f"the connection to worker {peer!r} broke while rows were exchanged: {error}"
            ) from error


def describe(value: object) -> object:
    """The value with meta tensors in place of its tensors, from which a reader rebuilds it."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, (Tensor, str, int, float, type(None))):
            raise TypeError(
                f"a heavy field of type {type(leaf).__name__} cannot be sent over a process group, only tensors, lists "
                "of plain values and mappings of these. Set row_transport=object_store"
            )
    return tree_map_only(Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), value)
