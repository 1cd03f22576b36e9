"""The contract of a rollout engine, and of an engine with weights of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError, SyncError
from unirl.distributed.group.dispatch import broadcast, collect, rank0, scatter
from unirl.distributed.group.rank import current
from unirl.distributed.weight_sync.base import Arrival, CanaryResult, ParamMapping, WeightLayout
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.routes import ReceiveBuckets, WeightRoute
from unirl.models.base import CanaryOutput, Pipeline
from unirl.types.batch import Batch, concat_rows, named_tensors, take_rows
from unirl.types.facts import ROWS_AT_ONCE, ModelFacts
from unirl.types.primitives import Decoded, Preview, VideoPreviews
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack


class RolloutEngine(ABC):
    """Turns a request into a response. The engine is usable after its constructor.

    A new engine implements `facts` and `generate`. The driver calls `facts` once, then `generate` in every step.
    """

    capabilities: ClassVar[Capabilities]

    @rank0
    @abstractmethod
    def facts(self) -> ModelFacts:
        """The facts of the model, from which the driver builds requests."""

    @scatter(RolloutResp.concat, order=RolloutResp.select)
    @abstractmethod
    def generate(self, req: RolloutReq) -> RolloutResp:
        """Sample one track for each track spec, with rows in the order of the request and the sigmas that it pins.

        The segment repeats the sigmas that were used, and every row has the weight version that it was sampled from.
        """

    @scatter(concat_rows, order=take_rows)
    def preview(self, decoded: Decoded) -> Preview:
        """The samples for display: images as 8-bit pixels, texts unchanged."""
        return decoded.preview()

    @scatter(concat_rows, order=take_rows)
    def trace(self, track: RolloutTrack) -> VideoPreviews:
        """The latents of each row at the stored positions of its trajectory, as the frames of a small video."""
        return track.segment.trace().preview()

    @rank0
    def spell(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        """The text of each token of each row. Empty for an engine whose model writes no texts."""
        return [()] * len(rows)

    @rank0
    def rows(self, track: RolloutTrack, name: str) -> dict[str, Tensor]:
        """All tensors of a track by name, on the CPU of the driver. See `named_tensors`."""
        return named_tensors(track, name)


RowsPerForward = int | Literal["auto"]
"""The setting `rollout.forward_batch_size`."""


def checked_rows(rows: RowsPerForward) -> RowsPerForward:
    """The setting itself. Raises ConfigError if it is less than 1."""
    if rows != "auto" and rows < 1:
        raise InvalidValueError(f"rollout.forward_batch_size must be >= 1, got {rows}")
    return rows


def rows_per_forward(rows: RowsPerForward, pipeline: Pipeline, req: RolloutReq) -> int:
    """The rows of one forward for a request. Tracks of one network take the number that suits all of them."""
    if rows != "auto":
        return rows
    if pipeline.bundle.device.type == "cpu":
        return ROWS_AT_ONCE
    samplings, dtype_bytes = [track.sampling for track in req.tracks.values()], pipeline.stage.autocast_dtype.itemsize
    return min(pipeline.facts.of(sampling).rows_at_once(sampling, dtype_bytes) for sampling in samplings)


@dataclass(frozen=True)
class EngineUse:
    """The parts of a recipe outside of the block `rollout` that an engine with a server depends on."""

    num_devices: int
    """The number of devices that sample. The engine runs once on each of them."""
    adapter_alpha: float | None
    """The setting backend.lora_cfg.alpha if adapters are sent. None: whole weights are."""
    model_path: str | None
    """The setting bundle.path. None: the bundle has none."""
    num_weights: int
    """The number of different weights that the run samples from, one after the other."""


class DedicatedEngine(RolloutEngine):
    """An engine with weights of its own, which the driver's `EngineSync` sends to it.

    It samples only from weights whose arrival was verified: it refuses from the beginning of a transfer until `accept`,
    and after a transfer that failed. The methods stand in the order of the calls. A new engine implements `facts`,
    `prepare`, `take`, `arrival`, `canary_inputs`, `canary`, `sample` and `move`; this class has the others.
    """

    held: tuple[int, str] | None = None
    """Optimizer updates and name of the engine's weights. None: no transfer has been verified."""
    receive_buckets: ReceiveBuckets | None = None
    is_asleep: bool = False

    @collect
    @abstractmethod
    def prepare(self, layout: WeightLayout) -> ParamMapping:
        """Map every tensor of the layout to exactly one parameter. Inject adapters if adapters will be sent."""

    @collect
    def connect(self, route: WeightRoute) -> None:
        """Open this end of a route on which the engine listens. Returns when all ends are open."""
        self.receive_buckets = route.open_receiver(current().rank)

    @broadcast
    def expect_weights(self) -> None:
        """Begin a transfer: sampling is refused until `accept`."""
        self.require_awake("take over weights")
        self.held = None

    @collect
    def listen(self) -> None:
        """Receive the buckets of one transfer."""
        assert self.receive_buckets is not None, "connect comes first"
        buckets = self.receive_buckets()
        try:
            for bucket in buckets:
                self.receive(bucket)
        finally:
            for _ in buckets:  # the sender and the other ranks still run the collectives of this transfer
                pass

    def receive(self, bucket: Bucket) -> None:
        """Receive one bucket: the engine's weights are unverified from now on."""
        self.held = None
        self.take(bucket)

    @abstractmethod
    def take(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket into the parameters that `prepare` found."""

    @collect
    @abstractmethod
    def arrival(self) -> Arrival:
        """Report which tensors arrived, with fingerprints read back from the network."""

    @rank0
    @abstractmethod
    def canary_inputs(self) -> Batch:
        """A fixed input for the trainer's network and the engine's."""

    @collect
    @abstractmethod
    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        """The difference between the network's output on `inputs` and `answer`, the trainer's output."""

    @collect
    def holds(self, version: int, weights: str) -> bool:
        """True if the engine can sample from these weights. A server that was restarted has lost them."""
        return self.held == (version, weights)

    @broadcast
    def accept(self, version: int, weights: str) -> None:
        """Sample from the weights of the last transfer, which the driver has verified."""
        self.held = (version, weights)

    def generate(self, req: RolloutReq) -> RolloutResp:
        """Sample from the weights that the request names. Every row has their version.

        Raises:
            SyncError: the engine has other weights, or none.
        """
        self.require_awake("sample")
        wanted = (req.weight_version, req.weights)
        if self.held != wanted:
            held = "no verified weights" if self.held is None else f"version {self.held[0]} ({self.held[1]})"
            raise SyncError(
                f"the request asks for weights of version {wanted[0]} ({wanted[1]}), but the engine has {held}: "
                "push them first"
            )
        with torch.no_grad():
            return self.sample(req)

    @abstractmethod
    def sample(self, req: RolloutReq) -> RolloutResp:
        """Sample from the present weights. Every row has their version."""

    @broadcast
    def sleep(self) -> None:
        """Move to main memory. Weights, adapters and their version are kept."""
        if not self.is_asleep:
            self.move(asleep=True)
            current().free_unused()
            self.is_asleep = True

    @broadcast
    def wake_up(self) -> None:
        """Move back to the device."""
        if self.is_asleep:
            self.move(asleep=False)
            self.is_asleep = False

    @abstractmethod
    def move(self, asleep: bool) -> None:
        """Move all modules to main memory, or back to the device."""

    def require_awake(self, what: str) -> None:
        """Raises RuntimeError while the engine is in main memory."""
        if self.is_asleep:
            raise RuntimeError(f"the engine cannot {what} while it sleeps: call wake_up() first")


def sampled_from(version: int, resp: RolloutResp) -> RolloutResp:
    """The response with the number of optimizer updates of the weights that its rows were sampled from."""
    return RolloutResp(
        {
            name: track.replace(weight_version=torch.full((len(track),), version, dtype=torch.int64))
            for name, track in resp.tracks.items()
        }
    )
