"""The train side of weight synchronisation: a role beside the backend whose weights travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import IncompatibleError, SyncError
from unirl.distributed.group.dispatch import broadcast, rank0
from unirl.distributed.group.process_group import host_store
from unirl.distributed.group.rank import current
from unirl.distributed.weight_sync.base import (
    Canary,
    Layout,
    Numerics,
    Payload,
    SendReport,
    TensorInfo,
    TransferConfig,
    Weights,
)
from unirl.distributed.weight_sync.bucket import Bucket, fill, plan_buckets
from unirl.distributed.weight_sync.channel import BucketSender, ColocatedEngine, WeightRoute
from unirl.distributed.weight_sync.fingerprint import PendingFingerprints

LIVE = "live"


class WeightSender:
    """Packs a backend's weights and puts them on the way. Materialising them is a collective: all ranks take part."""

    def __init__(self, weights: Weights, stage: Canary, colocated_engine: ColocatedEngine | None = None) -> None:
        """
        Args:
            weights: the backend.
            stage: the policy that it trains.
            colocated_engine: the engine, when it lives in this process.
        """
        self.weights = weights
        self.stage = stage
        self.colocated_engine = colocated_engine
        self.layout: Layout | None = None
        self.config: TransferConfig | None = None
        self.bucket_sender: BucketSender | None = None

    @broadcast
    def prepare(self, merge_adapters: bool) -> Layout:
        """What will be sent."""
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
        """Open the store where the ends of a route meet, reachable at this worker's address `host`."""
        return host_store(host)

    @broadcast
    def connect(self, config: TransferConfig, route: WeightRoute) -> None:
        """Open this end of the route. Returns when the other ends have opened theirs."""
        self.config = config
        if route.every_rank or current().rank == 0:
            self.bucket_sender = route.open_sender(self.colocated_engine)

    @broadcast
    def send(self, version: int, weights: str) -> SendReport:
        """Put all tensors of the payload on the way; returns when they are at the other ends."""
        assert self.layout is not None and self.config is not None, "prepare and connect come first"
        if weights == LIVE and version != self.weights.updates:
            raise SyncError(
                f"asked to send the weights after {version} updates; the trainer's are those after "
                f"{self.weights.updates}"
            )
        with torch.no_grad():
            tensors = self.weights.named_tensors(self.layout.payload, weights)
            try:
                return self._sent(tensors, version, weights)
            finally:
                for _ in tensors:  # the other ranks are in the collectives of this loop
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
        """`tensors`, the fingerprint of each taken as the engine should store it."""
        for name, tensor in tensors:
            if name in config.stored:
                prints.add(name, tensor.to(config.wire(name)).to(config.stored[name]))
            yield name, tensor

    @broadcast
    def canary(self, inputs: Any, weights: str) -> Any:
        """The answer of the trained network with `weights` to the engine's canary inputs.

        Compiled blocks run uncompiled: this compares weights, and two compilers need not round alike.
        """
        with torch.no_grad(), self.weights.weights(weights), self.weights.sampling(), uncompiled():
            return self.stage.canary(inputs.to(self.weights.device))


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled functions as they were written."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def payload_of(has_adapters: bool, merge_adapters: bool) -> Payload:
    """What travels, from what is trained."""
    if merge_adapters and not has_adapters:
        raise IncompatibleError(
            "sync.merge_adapters folds adapters into the weights, and none are trained: remove the key"
        )
    if not has_adapters:
        return "full"
    return "merged" if merge_adapters else "adapter"
