"""The driver's side of weight synchronisation: chooses the way, starts both ends, and judges the proof."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from unirl.config.errors import ConfigError, SyncError
from unirl.distributed.group.handle import Group, Handle, Pending
from unirl.distributed.weight_sync.base import Arrival, Binding, Layout, SendReport, SyncReport, Terms
from unirl.distributed.weight_sync.broadcast import Broadcast
from unirl.distributed.weight_sync.channel import InProcess, Route
from unirl.distributed.weight_sync.proof import check_arrivals, check_canary
from unirl.types.protocols import TORCH_DTYPES, DtypeName

Transport = Literal["auto", "in_process", "ray", "broadcast", "cuda_ipc"]
MIB = 2**20


@dataclass(frozen=True)
class Link:
    """One end as the driver sees it."""

    group: Group
    handle: Handle


class EngineSync:
    """Carries weights from a trainer to a dedicated engine, and believes nothing: see `push`."""

    def __init__(
        self,
        train: Link,
        rollout: Link,
        *,
        merge_adapters: bool = False,
        wire_dtype: DtypeName | None = None,
        bucket_mb: int = 512,
        transport: Transport = "auto",
    ) -> None:
        """
        Args:
            train: the group of the trainer and the handle of its `WeightSender`.
            rollout: the group and the handle of the engine.
            merge_adapters: send adapted weights with their adapters folded in, for an engine without adapters.
            wire_dtype: the dtype on the way; absent = as the engine stores.
            bucket_mb: MiB per message; a larger tensor travels alone.
            transport: auto = in_process where both live in one process, else broadcast.
        """
        if bucket_mb < 1:
            raise ConfigError(f"sync.bucket_mb must be >= 1, got {bucket_mb}", code=2004)
        self.train = train
        self.rollout = rollout
        self.merge_adapters = merge_adapters
        self.wire_dtype = None if wire_dtype is None else TORCH_DTYPES[wire_dtype]
        self.bucket_bytes = bucket_mb * MIB
        self.transport = transport
        self.deadline_s = rollout.group.deadline_s
        self.held: tuple[int, str] | None = None
        """Version and name of the weights that the engine is known to hold."""
        self.layout: Layout | None = None
        self.binding: Binding | None = None
        self.route: Route | None = None

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make the engine sample from the trainer's weights; nothing happens when it holds them already.

        What arrived is read back from every rank's network and compared with what was sent, tensor by tensor; then
        both sides answer the same canary input. Only then does the engine take the new weights into use.

        Raises:
            SyncError: 10002, naming the tensor, when anything differs. The engine then refuses to sample.
        """
        if self.held == (version, weights):
            return SyncReport(version, weights)
        start = time.perf_counter()
        self.held = None
        layout, binding, route = self._prepared()
        sent = self._carry(route, version, weights)
        arrivals: list[Arrival] = self.rollout.handle.arrival()
        check_arrivals(layout, sent, arrivals)
        absdiff = self._compare_forwards(layout, binding, weights)
        self.rollout.handle.accept(version, weights)
        self.held = (version, weights)
        return SyncReport(version, weights, sent.num_bytes, time.perf_counter() - start, absdiff)

    def _prepared(self) -> tuple[Layout, Binding, Route]:
        if self.layout is None or self.binding is None or self.route is None:
            self.layout = self.train.handle.prepare(self.merge_adapters)
            bindings: list[Binding] = self.rollout.handle.prepare(self.layout)
            self.binding = _agreed(bindings)
            self.route = self._open_route(Terms(self.binding.dtypes, self.wire_dtype, self.bucket_bytes))
        return self.layout, self.binding, self.route

    def _open_route(self, terms: Terms) -> Route:
        route = self._choose_route()
        waiting: Pending | None = None
        if route.listens:
            waiting = self.rollout.handle.connect.submit(route)
        self.train.handle.connect(terms, route)
        if waiting is not None:
            waiting.result(self.deadline_s)
        return route

    def _choose_route(self) -> Route:
        assert self.layout is not None
        beside = self.layout.has_neighbour
        transport = self.transport
        if transport == "auto":
            transport = "in_process" if beside else "broadcast"
        if beside != (transport == "in_process"):
            raise ConfigError(
                f"sync.transport={transport}, and the engine lives {'in' if beside else 'outside'} the trainer's "
                f"process: use {'in_process' if beside else 'broadcast or ray'}, or auto",
                code=2020,
            )
        if transport == "in_process":
            return InProcess()
        host, port = self.train.handle.listen(self.train.group.hosts[0])
        return Broadcast(host, port, self.rollout.group.num_ranks, self.deadline_s)

    def _carry(self, route: Route, version: int, weights: str) -> SendReport:
        listening = self.rollout.handle.listen.submit() if route.listens else None
        sent: SendReport = self.train.handle.send(version, weights)
        if listening is not None:
            listening.result(self.deadline_s)
        return sent

    def _compare_forwards(self, layout: Layout, binding: Binding, weights: str) -> float:
        inputs = self.rollout.handle.canary_inputs()
        answer = self.train.handle.canary(inputs, weights)
        return check_canary(layout, binding, self.rollout.handle.canary(inputs, answer))


def _agreed(bindings: list[Binding]) -> Binding:
    """The binding of all ranks. Raises SyncError when they differ."""
    for rank, binding in enumerate(bindings):
        if binding.dtypes != bindings[0].dtypes:
            name = next(name for name, dtype in binding.dtypes.items() if dtype != bindings[0].dtypes[name])
            raise SyncError(
                f"engine ranks store {name!r} differently: {bindings[0].dtypes[name]} on rank 0, "
                f"{binding.dtypes[name]} on rank {rank}"
            )
    return bindings[0]
