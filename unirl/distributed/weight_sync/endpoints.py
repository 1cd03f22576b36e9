"""The two sides of weight synchronisation: WeightSender beside the backend, WeightReceiver in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from unirl.config.errors import IncompatibleError, SyncError, did_you_mean
from unirl.distributed.group.dispatch import broadcast, rank0
from unirl.distributed.group.rank import current, host_store
from unirl.distributed.weight_sync.base import (
    Arrival,
    Canary,
    Layout,
    Numerics,
    Payload,
    SendReport,
    TensorInfo,
    TransferConfig,
    Weights,
)
from unirl.distributed.weight_sync.buckets import Bucket, BucketEntry, fill, plan_buckets
from unirl.distributed.weight_sync.fingerprint import PendingFingerprints, fingerprints
from unirl.distributed.weight_sync.routes import BucketSender, ColocatedEngine, WeightRoute

LIVE = "live"


class WeightSender:
    """A role that packs a backend's weights into buckets and sends them. Gathering them is a collective."""

    def __init__(self, weights: Weights, stage: Canary, colocated_engine: ColocatedEngine | None = None) -> None:
        """
        Args:
            weights: the backend.
            stage: the policy that the backend trains.
            colocated_engine: the engine if it lives in this process.
        """
        self.weights = weights
        self.stage = stage
        self.colocated_engine = colocated_engine
        self.layout: Layout | None = None
        self.config: TransferConfig | None = None
        self.bucket_sender: BucketSender | None = None

    @broadcast
    def prepare(self, merge_adapters: bool) -> Layout:
        """The layout of the tensors that will be sent."""
        spec = self.weights.adapter_spec()
        payload = payload_of(spec is not None, merge_adapters)
        tensors: dict[str, TensorInfo] = {}
        for name, tensor in self.weights.named_tensors(payload):
            if name in tensors:
                raise SyncError(f"the trainer's named_tensors give {name!r} twice")
            tensors[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)
        self.layout = Layout(
            payload=payload,
            tensors=tensors,
            adapter=spec if payload == "adapter" else None,
            numerics=Numerics.of(self.weights.module, self.stage.autocast_dtype, self.weights.device),
            has_colocated_engine=self.colocated_engine is not None,
        )
        return self.layout

    @rank0
    def listen(self, host: str) -> tuple[str, int]:
        """Open the store in which the ends of a route meet, at this worker's address `host`."""
        return host_store(host)

    @broadcast
    def connect(self, config: TransferConfig, route: WeightRoute) -> None:
        """Open this end of the route. Returns when the other ends are open."""
        self.config = config
        if route.every_rank or current().rank == 0:
            self.bucket_sender = route.open_sender(self.colocated_engine)

    @broadcast
    def send(self, version: int, weights: str) -> SendReport:
        """Send all tensors of the payload. Returns when they have arrived at the other ends."""
        assert self.layout is not None and self.config is not None, "prepare and connect come first"
        if weights == LIVE and version != self.weights.updates:
            raise SyncError(
                f"the driver asked for the weights after {version} updates, but the trainer has made "
                f"{self.weights.updates} updates"
            )
        with torch.no_grad():
            tensors = self.weights.named_tensors(self.layout.payload, weights)
            try:
                return self._sent(tensors, version, weights)
            finally:
                for _ in tensors:  # the other ranks still run the collectives of this loop
                    pass

    def _sent(self, tensors: Iterator[tuple[str, Tensor]], version: int, weights: str) -> SendReport:
        if self.bucket_sender is None:
            return SendReport(version, weights, {}, 0)
        assert self.layout is not None and self.config is not None
        prints = PendingFingerprints()
        num_bytes = 0
        observed = self._observed(tensors, self.config, prints)
        self.bucket_sender.begin()
        try:
            for number, plan in enumerate(plan_buckets(self.layout, self.config)):
                data = fill(plan, observed, self.weights.device)
                self.bucket_sender.put(Bucket(version, weights, number, plan.entries, data))
                num_bytes += data.numel()
            surplus = next(observed, None)
            if surplus is not None:
                raise SyncError(f"the trainer sent {surplus[0]!r}, which it had not announced")
        except BaseException as error:
            self.bucket_sender.abort(f"{type(error).__name__}: {error}")
            raise
        self.bucket_sender.finish()
        return SendReport(version, weights, prints.result(), num_bytes)

    @staticmethod
    def _observed(
        tensors: Iterator[tuple[str, Tensor]], config: TransferConfig, prints: PendingFingerprints
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors`, and fingerprint each as the engine should store it."""
        for name, tensor in tensors:
            if name in config.stored:
                prints.add(name, tensor.to(config.wire(name)).to(config.stored[name]))
            yield name, tensor

    @broadcast
    def canary(self, inputs: Any, weights: str) -> Any:
        """The output of the trained network with `weights` on the engine's canary inputs.

        Compiled blocks run uncompiled: this compares weights, and two compilers need not round alike.
        """
        with torch.no_grad(), self.weights.weights(weights), self.weights.sampling(), uncompiled():
            return self.stage.canary(inputs.to(self.weights.device))


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled functions without their compiled code."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def payload_of(has_adapters: bool, merge_adapters: bool) -> Payload:
    """The tensors to send, given what is trained."""
    if merge_adapters and not has_adapters:
        raise IncompatibleError(
            "sync.merge_adapters merges adapters into the weights, but no adapters are trained: remove the key"
        )
    if not has_adapters:
        return "full"
    return "merged" if merge_adapters else "adapter"


class WeightReceiver:
    """Maps every tensor of a layout to exactly one parameter of a network, and copies what arrives into it.

    Parameters are looked up by name each time, so that it fills and reads back what the network computes with.
    """

    def __init__(self, network: nn.Module, layout: Layout) -> None:
        """Raises SyncError, naming the tensor, when a tensor has no parameter, shares one, or has another shape."""
        self.network = network
        self.layout = layout
        self.version: int | None = None
        self.weights = ""
        self.number = -1
        self.received: list[str] = []
        self._bind()

    def _bind(self) -> None:
        parameters = dict(self.network.named_parameters(remove_duplicate=False))
        taken: dict[int, str] = {}
        for name, info in self.layout.tensors.items():
            if name not in parameters:
                raise SyncError(
                    f"the trainer sends {name!r}, and the engine's {type(self.network).__name__} has no such parameter."
                    f"{did_you_mean(name, parameters)} Both sides need the same bundle"
                )
            parameter = parameters[name]
            if tuple(parameter.shape) != info.shape:
                raise SyncError(
                    f"{name!r} is {list(info.shape)} at the trainer and {list(parameter.shape)} in the engine: another "
                    "architecture, or another LoRA rank"
                )
            if id(parameter) in taken:
                raise SyncError(f"{name!r} and {taken[id(parameter)]!r} are one parameter in the engine")
            taken[id(parameter)] = name

    def dtypes(self) -> dict[str, torch.dtype]:
        """The network's dtype of each tensor."""
        return {name: self.network.get_parameter(name).dtype for name in self.layout.tensors}

    def receive(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket. Raises SyncError when it is not the successor of the last bucket."""
        self._follow(bucket)
        for entry in bucket.entries:
            self._check(entry)
            self.network.get_parameter(entry.name).data.copy_(bucket.values(entry))
            self.received.append(entry.name)

    def _follow(self, bucket: Bucket) -> None:
        if bucket.number == 0:
            self.version, self.weights, self.number, self.received = bucket.version, bucket.weights, 0, []
            return
        wanted = (self.version, self.weights, self.number + 1)
        if (bucket.version, bucket.weights, bucket.number) != wanted:
            raise SyncError(
                f"bucket {bucket.number} of version {bucket.version} ({bucket.weights}) arrived instead of bucket "
                f"{wanted[2]} of version {wanted[0]} ({wanted[1]}); its first tensor is {bucket.entries[0].name!r}"
            )
        self.number += 1

    def _check(self, entry: BucketEntry) -> None:
        if entry.name not in self.layout.tensors:
            raise SyncError(
                f"{entry.name!r} arrived, but the trainer had not announced it."
                f"{did_you_mean(entry.name, self.layout.tensors)}"
            )
        if entry.name in self.received:
            raise SyncError(f"{entry.name!r} arrived twice")
        if entry.shape != self.layout.tensors[entry.name].shape:
            raise SyncError(
                f"{entry.name!r} arrived as {list(entry.shape)}, but {list(self.layout.tensors[entry.name].shape)} was "
                "announced"
            )

    def arrival(self) -> Arrival:
        """The network's present weights, as fingerprints."""
        held = ((name, self.network.get_parameter(name)) for name in self.layout.tensors)
        return Arrival(current().rank, self.version, self.weights, tuple(self.received), fingerprints(held))
