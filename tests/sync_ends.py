"""The two ends of weight synchronisation in one process, with faults to order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.config.errors import StallError
from unirl.distributed.group.dispatch import cut, remote_methods
from unirl.distributed.group.handle import Handle
from unirl.distributed.weight_sync.bucket import Bucket
from unirl.distributed.weight_sync.sender import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync, Link
from unirl.models.canary import VelocityCanary
from unirl.models.pipeline import DiffusionPipeline
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.testing.toy import ToyBundle, ToyPipeline
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig

NamedTensors = Iterator[tuple[str, Tensor]]
LORA = LoraConfig(rank=2, alpha=4.0)


class Waiting:
    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def result(self, deadline_s: float | None = None) -> Any:
        try:
            return self.future.result(deadline_s)
        except TimeoutError as error:
            raise StallError("late") from error


class OneProcess:
    """A group of one rank whose roles are given."""

    num_ranks = 1
    deadline_s = 20.0
    hosts = ("127.0.0.1",)
    workers = ()

    def __init__(self, name: str, **roles: Any) -> None:
        self.name = name
        self.roles = roles
        self.executor = ThreadPoolExecutor(1)

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = cut(method, remote_methods(type(self.roles[role]))[method], (args, kwargs), 1)
        return call.merge([getattr(self.roles[role], method)(*args, **kwargs)])

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Waiting:
        return Waiting(self.executor.submit(self.run, role, method, args, kwargs))

    def link(self, role: str) -> Link:
        return Link(self, Handle(self, role, type(self.roles[role])))  # type: ignore[arg-type]


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
    neighbours: bool = True,
    **keys: Any,
) -> Ends:
    """A toy trainer and its replica engine, joined in process."""
    trained = pipeline()
    backend = FaultyBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
    replica = FaultyEngine((engine_pipeline or pipeline)(), **(engine or {}))
    sender = WeightSender(backend, VelocityCanary(trained.stage), replica if neighbours else None)
    train, rollout = OneProcess("train", sender=sender), OneProcess("rollout", rollout=replica)
    return Ends(backend, trained, replica, sender, EngineSync(train.link("sender"), rollout.link("rollout"), **keys))
