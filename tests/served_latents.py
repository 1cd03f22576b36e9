"""A trainer and an engine of latents whose weights live in a server, for the tests of such engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.sync_ends import placed
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.testing.bundle import request_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

TOY = {"path": "toy", "dtype": "fp32"}
PROMPTS = ("a red circle", "two cats", "a house in the fog")
SD3 = (SD3Bundle, SD3Pipeline)


@dataclass
class Served:
    """A trainer and an engine whose weights live in a server."""

    trained: Any
    backend: FSDPBackend
    engine: Any
    sync: EngineSync

    @staticmethod
    def at(
        kind: Any, folder: Path, lora: LoraConfig | None = None, program: str = "fake", family: Any = SD3, **keys: Any
    ) -> Served:
        """An engine of the class `kind`, whose server is started when weights are sent."""
        bundle, pipeline = family
        merge = keys.pop("merge_adapters", False)
        trained = pipeline(bundle(**TOY))
        backend = FSDPBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
        engine = kind(pipeline(bundle(**TOY, meta_init=True)), folder, program=program, **keys)
        sender = WeightSender(backend, trained.stage, engine)
        pool = open_pool("local", 2, deadline_s=600.0)
        ends = placed(pool, 0, "sender", sender), placed(pool, 1, "rollout", engine)
        return Served(trained, backend, engine, EngineSync(*ends, merge_adapters=merge))

    def train(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.backend.trainable.values():
                parameter.add_(torch.empty(parameter.shape).normal_(std=0.05, generator=generator))
        self.backend.updates += 1

    def push(self) -> None:
        self.sync.push(self.backend.updates)

    def asking(self, **changes: object) -> RolloutReq:
        return asking(self.engine, **changes).from_weights("live", self.backend.updates)

    def sampled(self, req: RolloutReq) -> LatentSegment:
        segment = self.engine.generate(req).tracks["image"].segment
        assert isinstance(segment, LatentSegment)
        return segment

    def log_prob_gap(self, req: RolloutReq) -> float:
        """The largest difference between the engine's log-probs and the trainer's replay."""
        track = self.engine.generate(req).tracks["image"].sampled_as(LatentSegment)
        with torch.no_grad():
            replay = self.trained.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
        return float((track.segment.logp - replay.logp).abs().max())


def asking(engine: Any, **changes: object) -> RolloutReq:
    """A training request for three prompts with two samples each, of four steps with noise in the first two."""
    values: dict[str, Any] = {"kernel": FlowSDEStrategy(), "num_inference_steps": 4, "height": 32, "width": 32}
    values |= {"samples_per_prompt": 2, "sde_indices": (0, 1), "max_sequence_length": 16, **changes}
    params = DiffusionSamplingParams(**values)
    facts = engine.facts()
    levels = facts.schedule.sigmas(params.num_inference_steps, facts.image_seq_len(params))
    pinned = params.pinned(0, levels.tolist())
    return request_of(PROMPTS, "image", pinned).expand(params.samples_per_prompt)


@contextmanager
def serving(kind: Any, folder: Path, **keys: object) -> Iterator[Served]:
    """A trainer and an engine of the class `kind` whose server ends with the block."""
    served = Served.at(kind, folder, **keys)
    try:
        yield served
    finally:
        served.engine.server.stop()
