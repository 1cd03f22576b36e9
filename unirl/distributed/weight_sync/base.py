"""The contract of weight synchronisation: what the two ends agree on, and what each says about a transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from unirl.distributed.weight_sync.fingerprint import Fingerprint

Payload = Literal["adapter", "full", "merged"]
"""What travels: trained adapters; all trained weights; adapted weights with their adapters folded in."""


class AdapterSpec(Protocol):
    """What an engine must know to carry the same adapters."""

    @property
    def rank(self) -> int: ...

    @property
    def alpha(self) -> float: ...

    @property
    def targets(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a payload as the trainer stores it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Numerics:
    """What decides the bits of a forward besides the weights' values."""

    device: str
    threads: int
    compute: torch.dtype
    storage: tuple[str, ...]
    """The dtypes of the network's parameters."""

    @classmethod
    def of(cls, network: nn.Module, compute: torch.dtype, device: torch.device) -> Numerics:
        """Those of `network` on `device`."""
        cuda = device.type == "cuda"
        return cls(
            device=torch.cuda.get_device_name(device) if cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}",
            threads=0 if cuda else torch.get_num_threads(),
            compute=compute,
            storage=tuple(sorted({str(parameter.dtype) for parameter in network.parameters()})),
        )


@dataclass(frozen=True)
class Layout:
    """What the trainer will send: every tensor of the payload, in the order in which it comes."""

    payload: Payload
    tensors: Mapping[str, TensorInfo]
    adapter: AdapterSpec | None
    """Of payload `adapter`."""
    numerics: Numerics
    has_colocated_engine: bool
    """The engine lives in the process of the sender."""


@dataclass(frozen=True)
class ParamMapping:
    """The engine's answer to a layout: every tensor has its parameter."""

    dtypes: Mapping[str, torch.dtype]
    """How the engine stores each tensor."""
    numerics: Numerics


@dataclass(frozen=True)
class TransferConfig:
    """How tensors travel."""

    stored: Mapping[str, torch.dtype]
    """The engine's dtype of each tensor."""
    wire_dtype: torch.dtype | None
    """The dtype on the way; absent = as the engine stores."""
    bucket_bytes: int

    def wire(self, name: str) -> torch.dtype:
        """The dtype in which a tensor travels."""
        return self.wire_dtype or self.stored[name]


@dataclass(frozen=True)
class SendReport:
    """What the sender sent, as the engine should store it."""

    version: int
    weights: str
    fingerprints: Mapping[str, Fingerprint]
    num_bytes: int


@dataclass(frozen=True)
class Arrival:
    """What one rank of the engine holds after a transfer, read back from its network."""

    rank: int
    version: int | None
    """Of the last transfer that reached this rank; None = none did."""
    weights: str
    received: tuple[str, ...]
    """Tensors that came in that transfer."""
    fingerprints: Mapping[str, Fingerprint]


@dataclass(frozen=True)
class CanaryResult:
    """How far the engine's forward is from the trainer's on the same input."""

    equal: bool
    """Bit for bit."""
    absdiff: float
    """The largest absolute difference."""
    relative: float
    """The root mean square of the difference over that of the trainer's answer."""


@dataclass(frozen=True)
class SyncReport:
    """The transfer that brought the weights in use: the present one, or an earlier one when these were held already.

    So the figures of a step do not depend on what was evaluated before it, or on where a run resumed.
    """

    version: int
    """Optimizer updates behind the weights that the engine now samples from."""
    weights: str
    """`live`, or the snapshot's name."""
    num_bytes: int = 0
    seconds: float = 0.0
    canary_absdiff: float = 0.0


class WeightSync(Protocol):
    """Carries weights from a train backend to an engine."""

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make the engine sample from the backend's weights. Returns after arrival is proven."""
        ...


class NoSync:
    """The engine samples from the trained weights themselves: nothing travels."""

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """The weights that are in use anyway."""
        return SyncReport(version=version, weights=weights)


class Weights(Protocol):
    """What a sender asks of a train backend."""

    updates: int
    module: nn.Module

    @property
    def device(self) -> torch.device: ...

    def adapter_spec(self) -> AdapterSpec | None:
        """The adapters that are trained; None = all weights are."""
        ...

    def named_tensors(self, payload: Payload, weights: str = "live") -> Iterator[tuple[str, Tensor]]:
        """Full tensors on the backend's device, one at a time, in a fixed order; a collective where weights are
        sharded. A tensor is read before the next one is asked for."""
        ...

    def weights(self, name: str) -> Any:
        """Run with a snapshot's weights."""
        ...

    def sampling(self) -> Any:
        """Run without gradients, weights gathered."""
        ...


class Canary(Protocol):
    """A policy, whose answer to a fixed question tells two networks apart."""

    autocast_dtype: torch.dtype

    def canary(self, inputs: Any) -> Any:
        """The network's answer to the engine's canary inputs."""
        ...
