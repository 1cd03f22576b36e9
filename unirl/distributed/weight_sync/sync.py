"""The driver's side of weight synchronisation: chooses the way, starts both ends, and judges the proof."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unirl.config.errors import IncompatibleError, InvalidValueError, StallError, SyncError, UniRLError
from unirl.distributed.group.handle import Group, Handle, PendingCall, submit
from unirl.distributed.weight_sync.base import (
    Arrival,
    CanaryResult,
    Layout,
    ParamMapping,
    SendReport,
    SyncReport,
    TransferConfig,
)
from unirl.distributed.weight_sync.buckets import largest, plan_buckets
from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.distributed.weight_sync.listening_routes import BroadcastRoute, SharedBufferRoute
from unirl.distributed.weight_sync.routes import InProcessRoute, ObjectStoreRoute, WeightRoute
from unirl.types.protocols import TORCH_DTYPES, DtypeName

SyncTransport = Literal["auto", "in_process", "ray", "broadcast", "cuda_ipc"]
MIB = 2**20
GRACE_S = 5.0
"""For an engine to say why it failed, once the trainer has given up."""


@dataclass(frozen=True)
class SyncEndpoint:
    """One end as the driver sees it."""

    group: Group
    handle: Handle


@dataclass(frozen=True)
class Agreement:
    """What both ends settled before the first transfer."""

    layout: Layout
    mapping: ParamMapping
    config: TransferConfig
    route: WeightRoute


class EngineSync:
    """Carries weights from a trainer to a dedicated engine, and believes nothing: see `push`."""

    def __init__(
        self,
        train: SyncEndpoint,
        rollout: SyncEndpoint,
        *,
        merge_adapters: bool = False,
        wire_dtype: DtypeName | None = None,
        bucket_mb: int = 512,
        transport: SyncTransport = "auto",
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
            raise InvalidValueError(f"sync.bucket_mb must be >= 1, got {bucket_mb}")
        self.train = train
        self.rollout = rollout
        self.merge_adapters = merge_adapters
        self.wire_dtype = None if wire_dtype is None else TORCH_DTYPES[wire_dtype]
        self.bucket_bytes = bucket_mb * MIB
        self.transport = transport
        self.deadline_s = rollout.group.deadline_s
        self.last: SyncReport | None = None
        """Of the transfer that brought the weights that the engine is known to hold."""
        self.agreement: Agreement | None = None

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make the engine sample from the trainer's weights, and report the transfer that brought them.

        Nothing is sent when the engine holds them already.

        What arrived is read back from every rank's network and compared with what was sent, tensor by tensor; then
        both sides answer the same canary input. Only then does the engine take the new weights into use.

        Raises:
            SyncError: 10002, naming the tensor, when anything differs. The engine then refuses to sample.
        """
        if self.last is not None and (self.last.version, self.last.weights) == (version, weights):
            return self.last
        start = time.perf_counter()
        self.last = None
        if self.agreement is None:
            self.agreement = self._agree()
        agreed = self.agreement
        self.rollout.handle.expect_weights()
        sent = self._carry(agreed.route, version, weights)
        check_arrivals(agreed.layout, sent, self.rollout.handle.arrival())
        absdiff = self._compare_forwards(agreed, weights)
        self.rollout.handle.accept(version, weights)
        self.last = SyncReport(version, weights, sent.num_bytes, time.perf_counter() - start, absdiff)
        return self.last

    def _agree(self) -> Agreement:
        """Before the first transfer: the trainer says what comes, the engine binds it, and both open the route."""
        layout: Layout = self.train.handle.prepare(self.merge_adapters)
        mapping = _common(self.rollout.handle.prepare(layout))
        config = TransferConfig(mapping.dtypes, self.wire_dtype, self.bucket_bytes)
        route = self._choose_route(layout, config)
        waiting = submit(self.rollout.handle.connect, route) if route.listens else None
        self.train.handle.connect(config, route)
        if waiting is not None:
            waiting.result(self.deadline_s)
        return Agreement(layout, mapping, config, route)

    def _choose_route(self, layout: Layout, config: TransferConfig) -> WeightRoute:
        transport = choose_transport(self.transport, layout.has_colocated_engine)
        if transport == "in_process":
            return InProcessRoute()
        rollout = self.rollout.group
        if transport == "ray":
            return ObjectStoreRoute(rollout.workers, self.rollout.handle.role_name, self.deadline_s)
        host, port = self.train.handle.listen(self.train.group.hosts[0])
        if transport == "broadcast":
            return BroadcastRoute(host, port, rollout.num_ranks, self.deadline_s)
        return SharedBufferRoute(host, port, largest(plan_buckets(layout, config)), self.deadline_s)

    def _carry(self, route: WeightRoute, version: int, weights: str) -> SendReport:
        listening = submit(self.rollout.handle.listen) if route.listens else None
        try:
            sent: SendReport = self.train.handle.send(version, weights)
        except UniRLError as error:
            if listening is not None:
                _await_engine(listening, error)
            raise
        if listening is not None:
            listening.result(self.deadline_s)
        return sent

    def _compare_forwards(self, agreed: Agreement, weights: str) -> float:
        inputs = self.rollout.handle.canary_inputs()
        answer = self.train.handle.canary(inputs, weights)
        results: list[CanaryResult] = self.rollout.handle.canary(inputs, answer)
        return check_canary(agreed.layout, agreed.mapping, agreed.config, results)


def _await_engine(listening: PendingCall[Any], error: UniRLError) -> None:
    """The engine has stopped listening too. Raises its own error where the trainer only waited for it in vain."""
    try:
        listening.result(GRACE_S)
    except UniRLError as theirs:
        if isinstance(error, StallError):
            raise theirs from error


def choose_transport(transport: SyncTransport, same_process: bool) -> SyncTransport:
    """How weights travel, given whether trainer and engine share their processes.

    They do on equal device_sets (colocate), and always in runtime: local.

    Raises:
        ConfigError: 2020 when the transport does not fit.
    """
    if transport == "auto":
        return "in_process" if same_process else "broadcast"
    if same_process != (transport == "in_process"):
        where, better = ("in the trainer's own process", "in_process")
        if not same_process:
            where, better = ("in a process of its own", "broadcast (or ray)")
        raise IncompatibleError(
            f"sync.transport={transport} does not reach an engine that lives {where}: use {better}, or auto"
        )
    return transport


def _common(mappings: list[ParamMapping]) -> ParamMapping:
    """The mapping of all ranks. Raises SyncError when they differ."""
    for rank, mapping in enumerate(mappings):
        if mapping.dtypes != mappings[0].dtypes:
            name = next(name for name, dtype in mapping.dtypes.items() if dtype != mappings[0].dtypes[name])
            raise SyncError(
                f"engine ranks store {name!r} differently: {mappings[0].dtypes[name]} on rank 0, "
                f"{mapping.dtypes[name]} on rank {rank}"
            )
    return mappings[0]


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the canary's relative difference, by dtype, where equal bits cannot be expected."""


def check_arrivals(layout: Layout, sent: SendReport, arrivals: Sequence[Arrival]) -> None:
    """Raises SyncError, naming the tensor, unless every rank holds what was sent."""
    missing = [name for name in layout.tensors if name not in sent.fingerprints]
    if missing:
        raise SyncError(f"{missing[0]!r} was announced and never sent ({len(missing)} tensors)")
    for arrival in arrivals:
        _check_version(sent, arrival)
        for name, expected in sent.fingerprints.items():
            _check_tensor(name, expected, arrival)


def _check_version(sent: SendReport, arrival: Arrival) -> None:
    if (arrival.version, arrival.weights) == (sent.version, sent.weights):
        return
    held = "nothing" if arrival.version is None else f"version {arrival.version} ({arrival.weights})"
    first = next(iter(sent.fingerprints))
    raise SyncError(
        f"version {sent.version} ({sent.weights}) was sent, and {held} arrived at engine rank {arrival.rank}: "
        f"{first!r} and {len(sent.fingerprints) - 1} more tensors are stale"
    )


def _check_tensor(name: str, expected: Fingerprint, arrival: Arrival) -> None:
    place = f"at engine rank {arrival.rank} (version {arrival.version}, {arrival.weights})"
    if name not in arrival.received:
        raise SyncError(
            f"{name!r} was sent as {expected} and did not arrive {place}: it was dropped on the way, and the engine "
            "still computes with the values from before"
        )
    found = arrival.fingerprints.get(name)
    if found != expected:
        raise SyncError(
            f"{name!r} did not arrive as it was sent {place}: sent {expected}, the engine holds {found}. "
            f"{_likely_cause(expected, found)}"
        )


def _likely_cause(expected: Fingerprint, found: Fingerprint | None) -> str:
    if found is None:
        return "The engine does not read this tensor back"
    if found.shape != expected.shape:
        return "The engine changed the parameter's shape after it was bound"
    if found.dtype != expected.dtype:
        return "The engine changed the parameter's dtype after it was bound"
    return (
        "Shape and dtype are right and the bytes are not: bits flipped or part of a bucket was lost on the way, values "
        "were transposed or rounded, it was bound to another tensor's name, or the engine wrote to it afterwards"
    )


def check_canary(
    layout: Layout, mapping: ParamMapping, config: TransferConfig, results: Sequence[CanaryResult]
) -> float:
    """The largest absolute difference of the ranks. Raises SyncError when a forward is not the trainer's."""
    exact = _same_bits_expected(layout, mapping, config)
    limit = 0.0 if exact else _tolerance(layout, mapping, config)
    rule = "the bits should be equal, as device, dtypes and payload are" if exact else f"{limit:g} relative is allowed"
    for rank, result in enumerate(results):
        passed = result.equal if exact else result.relative <= limit  # False for NaN
        if not passed:
            raise SyncError(
                f"every tensor arrived, and yet the forward of engine rank {rank} is not the trainer's: on the canary "
                f"input they differ by {result.absdiff:.3g} ({result.relative:.3g} relative); {rule}. Likely causes: "
                "the engine loaded another base checkpoint, an adapter is inactive or a second one acts, or the engine "
                "computes in another way"
            )
    return max(result.absdiff for result in results)


def _same_bits_expected(layout: Layout, mapping: ParamMapping, config: TransferConfig) -> bool:
    unrounded = all(info.dtype == config.wire(name) == config.stored[name] for name, info in layout.tensors.items())
    return layout.payload != "merged" and unrounded and layout.numerics == mapping.numerics


def _tolerance(layout: Layout, mapping: ParamMapping, config: TransferConfig) -> float:
    """That of the coarsest dtype in which anything is computed, sent or stored."""
    dtypes = {layout.numerics.compute, mapping.numerics.compute, *config.stored.values()}
    return max(TOLERANCE[dtype] for dtype in dtypes | {config.wire(name) for name in layout.tensors})
