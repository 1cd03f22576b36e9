"""The contract of a rollout engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from unirl.config.errors import SyncError
from unirl.distributed.group.dispatch import broadcast, collect, rank0, scatter
from unirl.distributed.group.rank import current
from unirl.distributed.weight_sync.base import Arrival, CanaryResult, Layout, ParamMapping
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.routes import BucketReceiver, WeightRoute, unpacked
from unirl.types.batch import concat_rows, take_rows
from unirl.types.facts import ModelFacts
from unirl.types.primitives import Decoded, Preview
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


class RolloutEngine(ABC):
    """Produces a response from a request. After the constructor the engine is usable."""

    capabilities: ClassVar[Capabilities]

    @scatter(RolloutResp.concat, order=RolloutResp.select)
    @abstractmethod
    def generate(self, req: RolloutReq) -> RolloutResp:
        """One track per track spec; rows in the order of the request; the pinned sigmas are used and echoed."""

    @rank0
    @abstractmethod
    def facts(self) -> ModelFacts:
        """What the model knows of itself, for the driver to pin requests with."""

    @scatter(concat_rows, order=take_rows)
    def preview(self, decoded: Decoded) -> Preview:
        """The samples for people to look at: pictures as pixels of 8 bits, texts as they are."""
        return decoded.preview()


class DedicatedEngine(RolloutEngine):
    """An engine with weights of its own, which come by weight synchronisation.

    It samples only from weights whose arrival was proven: from the beginning of a transfer to `accept` it refuses, and
    so it does after a transfer that failed. What follows `generate` is called by the driver's `EngineSync` and, for
    `receive`, by the sender.
    """

    held: tuple[int, str] | None = None
    """Optimizer updates behind the weights that it holds, and their name; None = no proven weights."""
    bucket_receiver: BucketReceiver | None = None
    is_asleep: bool = False

    def generate(self, req: RolloutReq) -> RolloutResp:
        """Samples from the weights that the request names; every row says what they were.

        Raises:
            SyncError: the engine holds other weights, or none.
        """
        self.require_awake("sample")
        wanted = (req.weight_version, req.weights)
        if self.held != wanted:
            holds = "no proven weights" if self.held is None else f"version {self.held[0]} ({self.held[1]})"
            raise SyncError(
                f"the request asks for weights of version {wanted[0]} ({wanted[1]}), and the engine holds {holds}: "
                "push them first"
            )
        with torch.no_grad():
            resp = self.sample(req)
        version = self.held[0]
        return RolloutResp(
            {
                name: track.replace(weight_version=torch.full((len(track),), version, dtype=torch.int64))
                for name, track in resp.tracks.items()
            }
        )

    @abstractmethod
    def sample(self, req: RolloutReq) -> RolloutResp:
        """Samples from the weights of now."""

    @collect
    @abstractmethod
    def prepare(self, layout: Layout) -> ParamMapping:
        """Bind every tensor that will come to exactly one parameter; inject adapters if these are what comes."""

    @broadcast
    def expect_weights(self) -> None:
        """A transfer begins: nothing is proven until `accept`."""
        self.require_awake("take over weights")
        self.held = None

    @collect
    def connect(self, route: WeightRoute) -> None:
        """Open this end of a route on which it must listen. Returns when all ends are open."""
        self.bucket_receiver = route.open_receiver(current().rank)

    @collect
    def listen(self) -> None:
        """Receive one transfer."""
        assert self.bucket_receiver is not None, "connect comes first"
        buckets = self.bucket_receiver.buckets()
        try:
            for bucket in buckets:
                self.receive(bucket)
        finally:
            for _ in buckets:  # the sender and the other ranks are in the collectives of this transfer
                pass

    def receive(self, bucket: Bucket) -> None:
        """Take over the tensors of one bucket."""
        self.held = None
        self.take(bucket)

    def receive_packed(self, packed: Any) -> None:
        """The same, for a bucket that came through Ray's object store."""
        self.receive(unpacked(packed))

    @abstractmethod
    def take(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket into the network."""

    @collect
    @abstractmethod
    def arrival(self) -> Arrival:
        """What the network holds, read back from it."""

    @rank0
    @abstractmethod
    def canary_inputs(self) -> Any:
        """A fixed question for both networks."""

    @collect
    @abstractmethod
    def canary(self, inputs: Any, answer: Any) -> CanaryResult:
        """How far the network's own answer is from the trainer's."""

    @broadcast
    def accept(self, version: int, weights: str) -> None:
        """The weights that came last are proven: sample from them."""
        self.held = (version, weights)

    @broadcast
    def sleep(self) -> None:
        """Leave the device; weights, adapters and their version are kept."""
        if not self.is_asleep:
            self.move(asleep=True)
            current().free_unused()
            self.is_asleep = True

    @broadcast
    def wake_up(self) -> None:
        """Come back to the device."""
        if self.is_asleep:
            self.move(asleep=False)
            self.is_asleep = False

    def require_awake(self, what: str) -> None:
        """Raises RuntimeError while the engine sleeps."""
        if self.is_asleep:
            raise RuntimeError(f"the engine was asked to {what} while it sleeps: wake_up() comes first")

    @abstractmethod
    def move(self, asleep: bool) -> None:
        """Everything to main memory, or back."""
