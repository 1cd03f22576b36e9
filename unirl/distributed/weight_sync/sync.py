"""The driver's side of weight synchronisation: chooses the route, starts both ends, and verifies the arrival."""

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
"""Seconds that an engine has to report its own failure after the trainer's send failed."""


@dataclass(frozen=True)
class SyncEndpoint:
    """One end of the synchronisation, as the driver sees it."""

    group: Group
    handle: Handle


@dataclass(frozen=True)
class Agreement:
    """What both ends agreed on before the first transfer."""

    layout: Layout
    mapping: ParamMapping
    config: TransferConfig
    route: WeightRoute


class EngineSync:
    """Sends weights from a trainer to a dedicated engine, and verifies that they arrived (see `push`)."""

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
            train: the trainer's group and the handle of its `WeightSender`.
            rollout: the engine's group and handle.
            merge_adapters: send adapted weights with their adapters merged, for an engine without adapters.
            wire_dtype: the dtype in which tensors are sent. Absent = the engine's.
            bucket_mb: MiB per message. A larger tensor is sent alone.
            transport: auto = in_process where both ends live in one process, else broadcast.
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
        """The last verified transfer. None while the engine's weights are unknown."""
        self.agreement: Agreement | None = None

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make the engine sample from the trainer's weights, and report the transfer that brought them.

        Nothing is sent when the engine has them already.

        Every rank reads its network back, and each tensor is compared with what was sent. Then both sides run a forward
        on the same canary input. Only after that does the engine sample from the new weights.

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
        """Before the first transfer: the trainer describes the tensors, the engine maps them, both open the route."""
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
    """Wait until the engine stops listening, too. Raises the engine's error if the trainer's is only a timeout."""
    try:
        listening.result(GRACE_S)
    except UniRLError as theirs:
        if isinstance(error, StallError):
            raise theirs from error


def choose_transport(transport: SyncTransport, same_process: bool) -> SyncTransport:
    """The transport, given whether trainer and engine share their processes.

    They do on equal device sets (colocate), and always with runtime: local.

    Raises:
        ConfigError: 2020 when the transport does not fit.
    """
    if transport == "auto":
        return "in_process" if same_process else "broadcast"
    if same_process != (transport == "in_process"):
        where, better = ("in the trainer's own process", "in_process")
        if not same_process:
            where, better = ("in a process of its own", "broadcast (or ray)")
        raise IncompatibleError(f"sync.transport={transport} does not reach an engine {where}: use {better}, or auto")
    return transport


def _common(mappings: list[ParamMapping]) -> ParamMapping:
    """The mapping that all ranks have. Raises SyncError when they differ."""
    for rank, mapping in enumerate(mappings):
        if mapping.dtypes != mappings[0].dtypes:
            name = next(name for name, dtype in mapping.dtypes.items() if dtype != mappings[0].dtypes[name])
            raise SyncError(
                f"engine ranks store {name!r} differently: {mappings[0].dtypes[name]} on rank 0, "
                f"{mapping.dtypes[name]} on rank {rank}"
            )
    return mappings[0]


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest relative difference of the canary by dtype, where equal bits cannot be expected."""


def check_arrivals(layout: Layout, sent: SendReport, arrivals: Sequence[Arrival]) -> None:
    """Raises SyncError, naming the tensor, unless every rank has what was sent."""
    missing = [name for name in layout.tensors if name not in sent.fingerprints]
    if missing:
        raise SyncError(f"the trainer announced {missing[0]!r} and never sent it ({len(missing)} tensors)")
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
        f"version {sent.version} ({sent.weights}) was sent, but {held} arrived at engine rank {arrival.rank}: "
        f"{first!r} and {len(sent.fingerprints) - 1} more tensors are stale"
    )


def _check_tensor(name: str, expected: Fingerprint, arrival: Arrival) -> None:
    place = f"at engine rank {arrival.rank} (version {arrival.version}, {arrival.weights})"
    if name not in arrival.received:
        raise SyncError(
            f"{name!r} was sent as {expected} and did not arrive {place}: it was dropped on the route, and the engine "
            "still computes with the previous values"
        )
    actual = arrival.fingerprints.get(name)
    if actual != expected:
        raise SyncError(
            f"{name!r} did not arrive as it was sent {place}: sent {expected}, the engine holds {actual}. "
            f"{_likely_cause(expected, actual)}"
        )


def _likely_cause(expected: Fingerprint, actual: Fingerprint | None) -> str:
    if actual is None:
        return "The engine does not read this tensor back"
    if actual.shape != expected.shape:
        return "The engine changed the parameter's shape after it was bound"
    if actual.dtype != expected.dtype:
        return "The engine changed the parameter's dtype after it was bound"
    return (
        "Shape and dtype are right but the bytes are not: bits flipped or part of a bucket was lost on the way, values "
        "were transposed or rounded, it was bound to another tensor's name, or the engine wrote to it afterwards"
    )


def check_canary(
    layout: Layout, mapping: ParamMapping, config: TransferConfig, results: Sequence[CanaryResult]
) -> float:
    """The largest absolute difference over the ranks. Raises SyncError when a forward differs from the trainer's."""
    exact = _same_bits_expected(layout, mapping, config)
    limit = 0.0 if exact else _tolerance(layout, mapping, config)
    rule = "device, dtypes and payload require equal bits" if exact else f"{limit:g} relative is allowed"
    for rank, result in enumerate(results):
        passed = result.equal if exact else result.relative <= limit  # False for NaN
        if not passed:
            raise SyncError(
                f"every tensor arrived, but the forward of engine rank {rank} differs from the trainer's: on the "
                f"canary input they differ by {result.absdiff:.3g} ({result.relative:.3g} relative); {rule}. Likely "
                "causes: the engine loaded another base checkpoint, an adapter is inactive, a second adapter acts, or "
                "the engine computes in another way"
            )
    return max(result.absdiff for result in results)


def _same_bits_expected(layout: Layout, mapping: ParamMapping, config: TransferConfig) -> bool:
    unrounded = all(info.dtype == config.wire(name) == config.stored[name] for name, info in layout.tensors.items())
    return layout.payload != "merged" and unrounded and layout.numerics == mapping.numerics


def _tolerance(layout: Layout, mapping: ParamMapping, config: TransferConfig) -> float:
    """The tolerance of the coarsest dtype in which anything is computed, sent or stored."""
    dtypes = {layout.numerics.compute, mapping.numerics.compute, *config.stored.values()}
    return max(TOLERANCE[dtype] for dtype in dtypes | {config.wire(name) for name in layout.tensors})
