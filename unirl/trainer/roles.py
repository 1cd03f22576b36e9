"""The roles that the loop calls, typed as the classes that run."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.distributed.weight_sync.base import WeightSync
from unirl.reward.service import RewardService
from unirl.rollout.engine.base import RolloutEngine
from unirl.train.backend.base import TrainBackend
from unirl.train.stack import TrainStack


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a run. At run time each one is a handle, whose methods run where the role was placed."""

    rollout: RolloutEngine
    reward: RewardService
    stack: TrainStack
    backend: TrainBackend
    sync: WeightSync
    train_ranks: int
    """Data-parallel ranks of the stack."""
    has_own_weights: bool
    """The engine samples from a copy of the weights, which `sync` carries to it."""
