"""The driver's side of weight synchronisation: chooses the route, starts both ends, and verifies the arrival."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from unirl.config.errors import (
    IncompatibleError,
    InvalidValueError,
    RendezvousError,
    StallError,
    SyncError,
    UniRLError,
    WeightsLostError,
)
from unirl.distributed.group.handle import Handle, PendingCall, submit
from unirl.distributed.group.rendezvous import MARGIN_S, named_rendezvous
from unirl.distributed.weight_sync.base import (
    Arrival,
    CanaryResult,
    ParamMapping,
    SendReport,
    SyncReport,
    TransferConfig,
    WeightLayout,
)
from unirl.distributed.weight_sync.buckets import plan_buckets
from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.distributed.weight_sync.listening_routes import BroadcastRoute, SharedBufferRoute
from unirl.distributed.weight_sync.routes import InProcessRoute, ObjectStoreRoute, WeightRoute
from unirl.types.fp8 import FP8
from unirl.types.protocols import TORCH_DTYPES, DtypeName

SyncTransport = Literal["auto", "in_process", "ray", "broadcast", "cuda_ipc"]
MIB = 2**20
GRACE_S = 5.0
"""Seconds that an engine has to report its own failure after the trainer's send failed."""


@dataclass(frozen=True)
class Agreement:
    """What both ends agreed on before the first transfer."""

    layout: WeightLayout
    mapping: ParamMapping
    config: TransferConfig
    route: WeightRoute


class EngineSync:
    """Sends weights from a trainer to a dedicated engine, and verifies that they arrived (see `push`)."""

    def __init__(
        self,
        train: Handle,
        rollout: Handle,
        *,
        merge_adapters: bool = False,
        wire_dtype: DtypeName | None = None,
        bucket_mb: int = 512,
        transport: SyncTransport = "auto",
    ) -> None:
        """
        Args:
            train: the trainer's `WeightSender`.
            rollout: the engine.
            merge_adapters: send adapted weights with their adapters merged, for an engine without adapters.
            wire_dtype: the dtype in which tensors are sent. Absent = the engine's.
            bucket_mb: MiB per message. A larger tensor is sent alone.
            transport: auto = in_process where both ends live in one process, ray between GPUs and CPUs, else
                broadcast.
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
        self.connect_s = rollout.group.connect_s
        self.last: SyncReport | None = None
        """The last verified transfer. None while the engine's weights are unknown."""
        self.agreement: Agreement | None = None

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make the engine sample from the trainer's weights, and report the transfer that brought them.

        Nothing is sent when the engine has them already. A transfer during which a server was restarted begins again.

        Every rank reads its network back, and each tensor is compared with what was sent. Then both sides run a forward
        on the same canary input. Only after that does the engine sample from the new weights.

        Raises:
            SyncError: 10002, naming the tensor, when anything differs. The engine then refuses to sample.
        """
        last, wanted = self.last, (version, weights)
        if last is not None and (last.version, last.weights) == wanted and all(self.rollout.holds(*wanted)):
            return last
        while True:  # an engine restarts its server only a few times, and then raises another error
            with suppress(WeightsLostError):
                return self._push(version, weights)

    def _push(self, version: int, weights: str) -> SyncReport:
        start = time.perf_counter()
        self.last = None
        if self.agreement is None:
            self.agreement = self._agree()
        agreed = self.agreement
        self.rollout.expect_weights()
        sent = self._carry(agreed.route, version, weights)
        arrivals = self.rollout.arrival()
        check_arrivals(agreed.layout, sent, arrivals)
        inputs = self.rollout.canary_inputs()
        results = self.rollout.canary(inputs, self.train.canary(inputs, weights))
        absdiff = check_canary(agreed, results, all(arrival.is_read_back for arrival in arrivals))
        self.rollout.accept(version, weights)
        self.last = SyncReport(version, weights, sent.num_bytes, time.perf_counter() - start, absdiff)
        return self.last

    def _agree(self) -> Agreement:
        """Before the first transfer: the trainer describes the tensors, the engine maps them, both open the route."""
        layout: WeightLayout = self.train.prepare(self.merge_adapters)
        mapping = _common(self.rollout.prepare(layout), layout)
        config = TransferConfig(mapping.dtypes, self.wire_dtype, self.bucket_bytes, mapping.quantized)
        route = self._choose_route(layout, mapping, config)
        if route.listens:
            ends = [submit(self.rollout.connect, route), submit(self.train.connect, config, route)]
            self._await_connections(ends)
        else:
            self.train.connect(config, route)
        return Agreement(layout, mapping, config, route)

    def _await_connections(self, ends: Sequence[PendingCall[object]]) -> None:
        """Wait until both ends are connected. Raises the error of an end that failed, not of one that only waited."""
        errors = []
        for end in ends:
            try:
                with named_rendezvous():
                    end.result(self.connect_s + MARGIN_S)
            except RendezvousError as error:
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: error.is_consequence)

    def _choose_route(self, layout: WeightLayout, mapping: ParamMapping, config: TransferConfig) -> WeightRoute:
        transport = choose_transport(
            self.transport, layout.has_engine_in_process, layout.numerics.on_cpu != mapping.numerics.on_cpu
        )
        if transport == "in_process":
            return InProcessRoute()
        if transport == "ray":
            return ObjectStoreRoute(self.rollout.group.workers, self.rollout.role_name, self.deadline_s)
        address, plans = self.train.listen(self.train.group.hosts[0]), plan_buckets(layout, config)
        if transport == "broadcast":
            return BroadcastRoute(address, plans, self.rollout.num_ranks, self.deadline_s, self.connect_s)
        return SharedBufferRoute(address, plans, self.deadline_s, self.connect_s)

    def _carry(self, route: WeightRoute, version: int, weights: str) -> SendReport:
        listening = submit(self.rollout.listen) if route.listens else None
        try:
            sent: SendReport = self.train.send(version, weights)
        except UniRLError as error:
            if listening is not None:
                _await_engine(listening, error)
            raise
        if listening is not None:
            listening.result(self.deadline_s)
        return sent


def _await_engine(listening: PendingCall[object], error: UniRLError) -> None:
    """Wait until the engine stops listening, too. Raises the engine's error if the trainer's is only a timeout."""
    try:
        listening.result(GRACE_S)
    except UniRLError as theirs:
        if isinstance(error, StallError):
            raise theirs from error


def choose_transport(transport: SyncTransport, same_process: bool, mixes_cpu_and_gpu: bool = False) -> SyncTransport:
    """The transport, given whether trainer and engine share their processes.

    They do on equal device sets (colocate), and always with runtime: local.

    Args:
        mixes_cpu_and_gpu: one of them is on GPUs and the other one on CPUs, which no process group joins.

    Raises:
        ConfigError: 2020 when the transport does not fit.
    """
    if transport == "auto":
        return "in_process" if same_process else "ray" if mixes_cpu_and_gpu else "broadcast"
    if same_process != (transport == "in_process"):
        where, better = ("in the trainer's own process", "in_process")
        if not same_process:
            where, better = ("in a process of its own", "broadcast (or ray)")
        raise IncompatibleError(f"sync.transport={transport} does not reach an engine {where}: use {better}, or auto")
    if transport == "broadcast" and mixes_cpu_and_gpu:
        raise IncompatibleError(
            "sync.transport=broadcast joins trainer and engine in one process group, and one of them is on GPUs and "
            "the other one on CPUs. Use ray, or auto"
        )
    return transport


def _common(mappings: list[ParamMapping], layout: WeightLayout) -> ParamMapping:
    """The mapping that all ranks have, with the numerics of a rank that computes unlike the trainer if there is one.

    Raises SyncError when ranks differ in their dtypes.
    """
    for rank, mapping in enumerate(mappings):
        if mapping.dtypes != mappings[0].dtypes:
            name = next(name for name, dtype in mapping.dtypes.items() if dtype != mappings[0].dtypes[name])
            raise SyncError(
                f"engine ranks store {name!r} differently: {mappings[0].dtypes[name]} on rank 0, "
                f"{mapping.dtypes[name]} on rank {rank}"
            )
    return next((mapping for mapping in mappings if mapping.numerics != layout.numerics), mappings[0])


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, FP8: 0.25}
"""The largest relative difference of the canary by dtype, where equal bits cannot be expected."""


def check_arrivals(layout: WeightLayout, sent: SendReport, arrivals: Sequence[Arrival]) -> None:
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


def check_canary(agreed: Agreement, results: Sequence[CanaryResult], is_read_back: bool = True) -> float:
    """The largest absolute difference over the ranks. Raises SyncError when a forward differs from the trainer's.

    Args:
        is_read_back: see `Arrival`.
    """
    exact = _same_bits_expected(agreed)
    limit = 0.0 if exact else _tolerance(agreed)
    rule = "device, dtypes and payload require equal bits" if exact else f"{limit:g} relative is allowed"
    for rank, result in enumerate(results):
        passed = result.equal if exact else result.relative <= limit  # False for NaN
        if not passed:
            arrived = "every tensor arrived" if is_read_back else "the server took every tensor"
            raise SyncError(
                f"{arrived}, but the forward of engine rank {rank} differs from the trainer's: on the "
                f"canary input they differ by {result.absdiff:.3g} ({result.relative:.3g} relative); {rule}. Likely "
                f"causes: {result.causes}"
            )
    return max(result.absdiff for result in results)


def _same_bits_expected(agreed: Agreement) -> bool:
    layout, config = agreed.layout, agreed.config
    unrounded = all(info.dtype == config.wire(name) == config.stored[name] for name, info in layout.tensors.items())
    return layout.payload != "merged" and unrounded and layout.numerics == agreed.mapping.numerics


def _tolerance(agreed: Agreement) -> float:
    """The tolerance of the coarsest dtype in which anything is computed, sent or stored."""
    if str(FP8) in agreed.mapping.numerics.storage.values():
        return TOLERANCE[FP8]
    dtypes = {agreed.layout.numerics.compute, agreed.mapping.numerics.compute, *agreed.config.stored.values()}
    return max(TOLERANCE[dtype] for dtype in dtypes | {agreed.config.wire(name) for name in agreed.layout.tensors})
