"""The engine's end: tensors bound to the parameters of a network, filled, and read back."""

from __future__ import annotations

import torch
from torch import nn

from unirl.config.errors import SyncError, did_you_mean
from unirl.distributed.group.rank import current
from unirl.distributed.weight_sync.base import Arrival, Layout
from unirl.distributed.weight_sync.bucket import Bucket, BucketEntry
from unirl.distributed.weight_sync.fingerprint import fingerprints


class WeightReceiver:
    """Binds every tensor of a layout to exactly one parameter, and copies what arrives into it.

    Parameters are looked up by name each time, so that what is filled and read back is what the network computes with.
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
            found = parameters[name]
            if tuple(found.shape) != info.shape:
                raise SyncError(
                    f"{name!r} is {list(info.shape)} at the trainer and {list(found.shape)} in the engine: another "
                    "architecture, or another LoRA rank"
                )
            if id(found) in taken:
                raise SyncError(f"{name!r} and {taken[id(found)]!r} are one parameter in the engine")
            taken[id(found)] = name

    def dtypes(self) -> dict[str, torch.dtype]:
        """How each tensor is stored."""
        return {name: self.network.get_parameter(name).dtype for name in self.layout.tensors}

    def receive(self, bucket: Bucket) -> None:
        """Take over the tensors of a bucket. Raises SyncError when it does not follow the last one."""
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
                f"bucket {bucket.number} of version {bucket.version} ({bucket.weights}) came where bucket {wanted[2]} "
                f"of version {wanted[0]} ({wanted[1]}) was due; its first tensor is {bucket.entries[0].name!r}"
            )
        self.number += 1

    def _check(self, entry: BucketEntry) -> None:
        if entry.name not in self.layout.tensors:
            raise SyncError(
                f"{entry.name!r} arrived, which the trainer had not announced."
                f"{did_you_mean(entry.name, self.layout.tensors)}"
            )
        if entry.name in self.received:
            raise SyncError(f"{entry.name!r} arrived twice")
        if entry.shape != self.layout.tensors[entry.name].shape:
            raise SyncError(
                f"{entry.name!r} arrived as {list(entry.shape)}, and {list(self.layout.tensors[entry.name].shape)} was "
                "announced"
            )

    def arrival(self) -> Arrival:
        """What the network holds now."""
        held = ((name, self.network.get_parameter(name)) for name in self.layout.tensors)
        return Arrival(current().rank, self.version, self.weights, tuple(self.received), fingerprints(held))
