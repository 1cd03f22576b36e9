"""The two ends of weight synchronisation in one process, with faults to order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from tests.toy import ToyBundle, ToyPipeline
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Handle, Remote
from unirl.distributed.group.pool import Pool, open_pool
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig

NamedTensors = Iterator[tuple[str, Tensor]]
LORA = LoraConfig(rank=2, alpha=4.0)


class FaultyBackend(FSDPBackend):
    """A backend whose stream of tensors a test can bend."""

    bend: Callable[[NamedTensors], NamedTensors] = staticmethod(lambda tensors: tensors)

    def named_tensors(self, payload: Any, weights: str = "live") -> NamedTensors:
        yield from self.bend(super().named_tensors(payload, weights))


class FaultyEngine(ReplicaRolloutEngine):
    """An engine to which a test can hand other buckets than were sent."""

    bend: Callable[[Bucket], Bucket | None] = staticmethod(lambda bucket: bucket)

    def receive(self, bucket: Bucket) -> None:
        bent = self.bend(bucket)
        if bent is not None:
            super().receive(bent)


@dataclass
class Ends:
    """A trainer, an engine, and what joins them."""

    backend: FaultyBackend
    trained: DiffusionPipeline[Any]
    engine: FaultyEngine
    sender: WeightSender
    sync: EngineSync

    @property
    def network(self) -> nn.Module:
        """The engine's."""
        return self.engine.network

    def train(self, seed: int = 0) -> None:
        """An update that moves every trainable weight."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.backend.trainable.values():
                parameter.add_(torch.empty(parameter.shape).normal_(std=0.3, generator=generator))
        self.backend.updates += 1


def toy_pipeline(**shape: int) -> ToyPipeline:
    return ToyPipeline(ToyBundle(**shape))


def ends(
    lora: LoraConfig | None = LORA,
    pipeline: Callable[[], DiffusionPipeline[Any]] = toy_pipeline,
    engine_pipeline: Callable[[], DiffusionPipeline[Any]] | None = None,
    engine: dict[str, Any] | None = None,
    colocated: bool = True,
    **keys: Any,
) -> Ends:
    """A toy trainer and its replica engine, joined in process."""
    trained = pipeline()
    backend = FaultyBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
    replica = FaultyEngine((engine_pipeline or pipeline)(), **(engine or {}))
    sender = WeightSender(backend, trained.stage, replica if colocated else None)
    pool = open_pool("local", 2, deadline_s=600.0)
    links = [placed(pool, i, name, role) for i, (name, role) in enumerate([("sender", sender), ("rollout", replica)])]
    return Ends(backend, trained, replica, sender, EngineSync(*links, **keys))


@dataclass
class Served:
    """A trainer and an engine whose weights live in a server."""

    trained: Any
    backend: FSDPBackend
    engine: Any
    sync: EngineSync

    @classmethod
    def joining(cls, trained: Any, engine: Any, lora: LoraConfig | None = None, **keys: Any) -> Self:
        """A pipeline that is trained, and an engine of the same model, in one process."""
        backend = FSDPBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
        roles = {"sender": WeightSender(backend, trained.stage, engine), "rollout": engine}
        pool = open_pool("local", 2, deadline_s=600.0)
        links = [placed(pool, device, name, role) for device, (name, role) in enumerate(roles.items())]
        return cls(trained, backend, engine, EngineSync(*links, **keys))

    def train(self, seed: int = 0) -> None:
        """An update that moves every trainable weight."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.backend.trainable.values():
                parameter.add_(torch.empty(parameter.shape).normal_(std=0.05, generator=generator))
        self.backend.updates += 1

    def push(self) -> None:
        self.sync.push(self.backend.updates)


def placed(pool: Pool, device: int, name: str, role: Any) -> Handle:
    """A role that exists already, on a device of its own."""
    group = pool.group(DeviceSet("device", (device,)))
    return group.place(Remote(name, lambda siblings: role))
