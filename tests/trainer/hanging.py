"""Parts of a recipe that do not come back on one rank, each in another phase of the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from unirl.algorithms.base import START
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.distributed import current
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine


def hang_on_the_last_rank(until: str) -> None:
    """Wait for the file `until`; the other ranks go on, and wait for this one at their next collective, if any."""
    rank = current()
    if rank.rank == rank.world_size - 1:
        while not Path(until).exists():
            time.sleep(0.02)


class HangingEngine(TrainsideRolloutEngine):
    def __init__(self, pipeline, backend, *, until: str, forward_batch_size: int = 8) -> None:
        super().__init__(pipeline, backend, forward_batch_size=forward_batch_size)
        self.until = until

    def generate(self, req):
        hang_on_the_last_rank(self.until)
        return super().generate(req)


class FailingEngine(TrainsideRolloutEngine):
    """Raises on the last rank in a forward, while the others wait for it to gather the next block."""

    def generate(self, req):
        if current().rank == current().world_size - 1:
            blocks = [m for m in self.pipeline.bundle.trainable().modules() if "TransformerBlock" in type(m).__name__]
            blocks[0].register_forward_pre_hook(out_of_sorts)
        return super().generate(req)


def out_of_sorts(*_):
    raise OverflowError("out of sorts")


class HangingScorer(BrightnessRewardScorer):
    def __init__(self, *, until: str) -> None:
        self.until = until

    def score(self, request):
        hang_on_the_last_rank(self.until)
        return super().score(request)


@dataclass(frozen=True, kw_only=True)
class HangingLoss(DiffusionGRPO):
    until: str

    def loss(self, stage, rows, part, now=START):
        hang_on_the_last_rank(self.until)
        return super().loss(stage, rows, part, now)


@dataclass(frozen=True, kw_only=True)
class FailingLoss(DiffusionGRPO):
    """Raises on the last rank, while the others wait for it."""

    def loss(self, stage, rows, part, now=START):
        if current().rank == current().world_size - 1:
            raise OverflowError("out of sorts")
        return super().loss(stage, rows, part, now)


class HangingReplica(ReplicaRolloutEngine):
    """Does not take over what it is sent."""

    def __init__(self, pipeline, *, until: str, forward_batch_size: int = 8) -> None:
        super().__init__(pipeline, forward_batch_size=forward_batch_size)
        self.until = until

    def take(self, bucket):
        hang_on_the_last_rank(self.until)
        super().take(bucket)
