"""The two sides of weight synchronisation: WeightSender beside the backend, WeightReceiver in the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from unirl.config.errors import IncompatibleError, SyncError, did_you_mean
from unirl.distributed.group.dispatch import broadcast, rank0
from unirl.distributed.group.rank import current
from unirl.distributed.group.rendezvous import Address, host_store
from unirl.distributed.weight_sync.base import (
    Arrival,
    Canary,
    Numerics,
    Payload,
    SendReport,
    TensorInfo,
    TransferConfig,
    WeightLayout,
    Weights,
)
from unirl.distributed.weight_sync.buckets import Bucket, BucketEntry, filled, plan_buckets
from unirl.distributed.weight_sync.fingerprint import Fingerprint, PendingFingerprints, fingerprints
from unirl.distributed.weight_sync.routes import ColocatedEngine, SendBuckets, WeightRoute
from unirl.types.batch import Batch
from unirl.types.fp8 import Fp8Linear, packed, quantized
from unirl.types.progress import progress


class WeightSender:
    """A role that packs a backend's weights into buckets and sends them. Gathering them is a collective."""

    def __init__(self, weights: Weights, stage: Canary, engine_in_process: ColocatedEngine | None = None) -> None:
        """
        Args:
            weights: the backend.
            stage: the policy that the backend trains.
            engine_in_process: the engine if it lives in this process.
        """
        self.weights = weights
        self.stage = stage
        self.engine_in_process = engine_in_process
        self.layout: WeightLayout | None = None
        self.config: TransferConfig | None = None
        self.send_buckets: SendBuckets | None = None

    @broadcast
    def prepare(self, merge_adapters: bool) -> WeightLayout:
        """The layout of the tensors that will be sent."""
        spec = self.weights.adapter_spec()
        payload = payload_of(spec is not None, merge_adapters)
        tensors: dict[str, TensorInfo] = {}
        for name, tensor in self.weights.named_tensors(payload):
            if name in tensors:
                raise SyncError(f"the trainer's named_tensors give {name!r} twice")
            tensors[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)
        self.layout = WeightLayout(
            payload=payload,
            tensors=tensors,
            adapter=spec if payload == "adapter" else None,
            numerics=Numerics.of(self.weights.module, self.stage.autocast_dtype, self.weights.device),
            has_engine_in_process=self.engine_in_process is not None,
        )
        return self.layout

    @rank0
    def listen(self, host: str) -> Address:
        """Open the store in which the ends of a route meet, at this worker's address `host`."""
        return host_store(host)

    @broadcast
    def connect(self, config: TransferConfig, route: WeightRoute) -> None:
        """Open this end of the route. Returns when the other ends are open."""
        self.config = config
        if route.every_rank or current().rank == 0:
            self.send_buckets = route.open_sender(self.engine_in_process)

    @broadcast
    def send(self, version: int, weights: str) -> SendReport:
        """Send all tensors of the payload. Returns when they have arrived at the other ends."""
        assert self.layout is not None and self.config is not None, "prepare and connect come first"
        if weights == "live" and version != self.weights.updates:
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
        if self.send_buckets is None:
            return SendReport(version, weights, {}, 0)
        assert self.layout is not None and self.config is not None
        prints = PendingFingerprints()
        plans = plan_buckets(self.layout, self.config)
        self.send_buckets(filled(plans, self._observed(tensors, prints), version, weights, self.weights.device))
        return SendReport(version, weights, prints.result(), sum(plan.num_bytes for plan in plans))

    def _observed(
        self, tensors: Iterator[tuple[str, Tensor]], prints: PendingFingerprints
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors`, and fingerprint each as the engine should store it."""
        assert self.config is not None
        for name, tensor in tensors:
            if name in self.config.stored:
                stored = tensor.to(self.config.wire(name)).to(self.config.stored[name])
                prints.add(name, packed(*quantized(stored)) if name in self.config.quantized else stored)
            progress("sent tensor")
            yield name, tensor

    @broadcast
    def canary(self, inputs: Batch, weights: str) -> object:
        """The output of the trained network with `weights` on the engine's canary inputs.

        All ranks run this one forward, so sharded weights stay sharded and are gathered block by block. Compiled blocks
        run uncompiled: this compares weights, and two compilers need not round alike.
        """
        with torch.no_grad(), self.weights.weights(weights), set_stance("force_eager"):
            return self.stage.canary(inputs.to(self.weights.device))


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

    def __init__(self, network: nn.Module, layout: WeightLayout) -> None:
        """Raises SyncError, naming the tensor, when a tensor has no parameter, shares one, or has another shape."""
        self.network = network
        self.layout = layout
        self.version: int | None = None
        self.weights = ""
        self.number = -1
        self.received: list[str] = []
        parameters = dict(network.named_parameters(remove_duplicate=False))
        taken: dict[int, str] = {}
        for name, info in layout.tensors.items():
            if name not in parameters:
                raise SyncError(
                    f"the trainer sends {name!r}, and the engine's {type(network).__name__} has no such parameter."
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
        """The network's dtype of each tensor; of a quantised one, the dtype before it is quantised."""
        layers = self._quantized_layers()
        return {
            name: layers[name].wide_dtype if name in layers else self.network.get_parameter(name).dtype
            for name in self.layout.tensors
        }

    def quantized(self) -> frozenset[str]:
        """The tensors that the network stores in eight bits."""
        return frozenset(self._quantized_layers())

    def _quantized_layers(self) -> dict[str, Fp8Linear]:
        """The layers that quantise their weights, by the names of these weights, as far as they are sent."""
        named = {f"{name}.weight": module for name, module in self.network.named_modules()}
        return {
            name: module
            for name, module in named.items()
            if isinstance(module, Fp8Linear) and name in self.layout.tensors
        }

    def receive(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket. Raises SyncError when it is not the successor of the last bucket."""
        self._follow(bucket)
        progress("received bucket")
        layers = self._quantized_layers()
        for entry in bucket.entries:
            self._check(entry)
            if entry.name in layers:
                layers[entry.name].store(bucket.values(entry))
            else:
                self._store(entry.name, bucket.values(entry))
            self.received.append(entry.name)

    def _store(self, name: str, values: Tensor) -> None:
        """Keep the values of one tensor. Their memory is reused for the next bucket."""
        self.network.get_parameter(name).data.copy_(values)

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
        layers = self._quantized_layers()
        held = (
            (name, layers[name].stored_bytes() if name in layers else self.network.get_parameter(name))
            for name in self.layout.tensors
        )
        return self._report(fingerprints(held))

    def _report(self, held: Mapping[str, Fingerprint], is_read_back: bool = True) -> Arrival:
        """The report on the last transfer, given the fingerprints of the tensors that are held now."""
        received = tuple(self.received)
        return Arrival(current().rank, self.version, self.weights, received, dict(held), is_read_back=is_read_back)


class WeightForwarder(WeightReceiver):
    """Checks what arrives on its way to a server that has the network.

    The network of this process has no storage: it only names parameters, shapes and dtypes.
    """

    def __init__(self, network: nn.Module, layout: WeightLayout) -> None:
        super().__init__(network, layout)
        self._bucket: dict[str, Tensor] = {}
        self._forwarded = PendingFingerprints()

    def checked(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """The tensors of a bucket by name, in the dtypes of the network. Raises SyncError as `receive` does."""
        self._bucket = {}
        if bucket.number == 0:
            self._forwarded = PendingFingerprints()
        self.receive(bucket)
        return self._bucket

    def _store(self, name: str, values: Tensor) -> None:
        self._bucket[name] = values.to(self.network.get_parameter(name).dtype)
        self._forwarded.add(name, self._bucket[name])

    def arrival_of(self, held: Mapping[str, Fingerprint] | None) -> Arrival:
        """The report on the last transfer, given what the server holds. None: it cannot be asked."""
        if held is not None:
            return self._report(held)
        return self._report(self._forwarded.result(), is_read_back=False)
