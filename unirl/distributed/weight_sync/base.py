"""The contract of weight synchronisation: what both ends agree on, and their reports on a transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.types.batch import Batch
from unirl.types.device import device_name
from unirl.types.facts import LoraSpec
from unirl.types.protocols import WeightSource

Payload = Literal["adapter", "full", "merged"]
"""The tensors that are sent: trained adapters, all trained weights, or adapted weights with the adapters merged."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of one tensor of a payload at the trainer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Numerics:
    """The settings that determine the bits of a forward, besides the values of the weights."""

    device: str
    threads: int
    compute: torch.dtype
    storage: Mapping[str, str]
    """The dtype of each parameter of the network. Libraries keep some parameters of a bf16 network in float32."""

    @property
    def on_cpu(self) -> bool:
        """True if the forward runs on a CPU."""
        return self.device.startswith("cpu ")

    @classmethod
    def of(cls, network: nn.Module, compute: torch.dtype, device: torch.device) -> Numerics:
        """The numerics of `network` on `device`."""
        on_cpu = device.type == "cpu"
        return cls(
            device=f"cpu {torch.backends.cpu.get_cpu_capability()}" if on_cpu else device_name(device),
            threads=torch.get_num_threads() if on_cpu else 0,
            compute=compute,
            storage={name: str(parameter.dtype) for name, parameter in network.named_parameters()},
        )


@dataclass(frozen=True)
class WeightLayout:
    """What the trainer will send: every tensor of the payload, in the order of sending."""

    payload: Payload
    tensors: Mapping[str, TensorInfo]
    adapter: LoraSpec | None
    """The adapters, for the payload `adapter`."""
    numerics: Numerics
    has_engine_in_process: bool
    """True when the engine lives in the process of the sender."""


@dataclass(frozen=True)
class ParamMapping:
    """The engine's answer to a layout, after it found one parameter for every tensor."""

    dtypes: Mapping[str, torch.dtype]
    """The engine's dtype of each tensor; of a quantised one, the dtype before it is quantised."""
    numerics: Numerics
    quantized: frozenset[str] = frozenset()
    """The tensors that the engine stores in eight bits (unirl/types/fp8.py)."""


@dataclass(frozen=True)
class TransferConfig:
    """How tensors are sent."""

    stored: Mapping[str, torch.dtype]
    """`ParamMapping.dtypes` of the engine."""
    wire_dtype: torch.dtype | None
    """The dtype while they are sent. None: the engine's dtype."""
    bucket_bytes: int
    quantized: frozenset[str] = frozenset()
    """`ParamMapping.quantized` of the engine."""

    def wire(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is sent."""
        return self.wire_dtype or self.stored[name]


@dataclass(frozen=True)
class SendReport:
    """The sender's report: what it sent, with fingerprints of the tensors as the engine should store them."""

    version: int
    weights: str
    fingerprints: Mapping[str, Fingerprint]
    num_bytes: int


@dataclass(frozen=True)
class Arrival:
    """One engine rank's report after a transfer."""

    rank: int
    version: int | None
    """The version of the last transfer that reached this rank. None: no transfer did."""
    weights: str
    received: tuple[str, ...]
    """Names of the tensors that arrived in that transfer."""
    fingerprints: Mapping[str, Fingerprint]
    is_read_back: bool = True
    """True if the fingerprints are of the tensors that the engine computes with. False if they are of the tensors that
    its process gave to a server, which cannot be asked for tensors."""


@dataclass(frozen=True)
class CanaryResult:
    """The difference between the engine's and the trainer's forward on the same input."""

    equal: bool
    """True when all bits are equal."""
    absdiff: float
    """The largest absolute difference."""
    relative: float
    """The root mean square of the difference, divided by that of the trainer's output."""
    causes: str = (
        "the engine loaded another base checkpoint, an adapter is inactive, a second adapter acts, or the engine "
        "computes in another way"
    )
    """What a difference may come from, and what to do then, for the message about it."""


@dataclass(frozen=True)
class SyncReport:
    """The transfer that brought the weights in use: this one, or an earlier one when the engine had them already.

    The metrics of a step therefore do not depend on earlier evaluations, or on where a run resumed.
    """

    version: int
    """Optimizer updates of the weights that the engine samples from."""
    weights: str
    """`live`, or the snapshot's name."""
    num_bytes: int = 0
    seconds: float = 0.0
    canary_absdiff: float = 0.0


class WeightSync(Protocol):
    """Sends weights from a train backend to an engine."""

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make the engine sample from the backend's weights. Returns after their arrival is verified."""


class NoSync:
    """For engines that sample from the trained weights themselves: nothing is sent."""

    def push(self, version: int, weights: str = "live") -> SyncReport:
        return SyncReport(version=version, weights=weights)


class Weights(WeightSource, Protocol):
    """The part of a train backend that a sender uses."""

    module: nn.Module

    @property
    def device(self) -> torch.device: ...

    def adapter_spec(self) -> LoraSpec | None:
        """The adapters that are trained. None: all weights are trained."""

    def named_tensors(self, payload: Payload, weights: str = "live") -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on the backend's device, one at a time, in a fixed order. A collective where weights are
        sharded. The caller reads a tensor before it takes the next one."""


class Canary(Protocol):
    """A policy that can run the canary forward: a fixed input on which two equal networks agree."""

    autocast_dtype: torch.dtype

    def canary(self, inputs: Batch) -> object:
        """The network's output on the engine's canary inputs."""
