"""Transitions at random, and stages whose critics are built as a stack builds them."""

from __future__ import annotations

from typing import Any

import torch

from tests.scripted_environment import Clocks
from unirl.algorithms.sac import SAC
from unirl.models.policies.bundle import GaussianBundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.models.policies.stage import ActionStage
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, ValueConfig
from unirl.train.replay_stack import ReplayStack
from unirl.types.environments import ContinuousActions
from unirl.types.transitions import Transitions


def squashed_pipeline(cuts: bool = False) -> PolicyPipeline:
    bundle = GaussianBundle(observations=2, actions=2, squashed=True, width=8, activation="relu")
    return PolicyPipeline(bundle, env=Clocks(ContinuousActions(2), cuts))


def stage_with_critics(algorithm: SAC) -> ActionStage:
    stage = squashed_pipeline().stage
    stage.value_head = algorithm.build_head(stage, 8, seed=3)
    return stage


def replay_stack(policy: PolicyPipeline, algorithm: SAC | None = None, **settings: Any) -> ReplayStack:
    backend = FSDPBackend(
        policy.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        value_cfg=ValueConfig(learning_rate=1e-2, width=8),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64"),
    )
    return ReplayStack(backend, algorithm or SAC(), policy.stage, **{"minibatch_size": 4, "warmup": 2} | settings)


def transitions(count: int = 12, seed: int = 0) -> Transitions:
    draw = torch.Generator().manual_seed(seed)
    return Transitions(
        observations={"state": torch.randn(count, 2, generator=draw)},
        actions=torch.randn(count, 2, generator=draw),
        rewards=torch.randn(count, generator=draw),
        discounts=0.9 * torch.randint(2, (count,), generator=draw),
        following={"state": torch.randn(count, 2, generator=draw)},
    )
