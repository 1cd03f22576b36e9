"""Parts of a recipe that never come back on one rank, each in another phase of the loop."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from unirl.algorithms.base import START
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.distributed import current
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine


def hang_on_the_last_rank() -> None:
    """Wait for ever; the other ranks go on, and wait for this one at their next collective, if there is any."""
    rank = current()
    if rank.rank == rank.world_size - 1:
        threading.Event().wait()


class HangingEngine(TrainsideRolloutEngine):
    def generate(self, req):
        hang_on_the_last_rank()
        return super().generate(req)


class HangingScorer(BrightnessRewardScorer):
    def score(self, request):
        hang_on_the_last_rank()
        return super().score(request)


@dataclass(frozen=True, kw_only=True)
class HangingLoss(DiffusionGRPO):
    def loss(self, stage, rows, part, now=START):
        hang_on_the_last_rank()
        return super().loss(stage, rows, part, now)


@dataclass(frozen=True, kw_only=True)
class FailingLoss(DiffusionGRPO):
    """Raises on the last rank, while the others wait for it."""

    def loss(self, stage, rows, part, now=START):
        if current().rank == current().world_size - 1:
            raise OverflowError("out of sorts")
        return super().loss(stage, rows, part, now)


class HangingReplica(ReplicaRolloutEngine):
    """Never takes over what it is sent."""

    def take(self, bucket):
        hang_on_the_last_rank()
