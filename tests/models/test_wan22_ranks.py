"""Sharded experts: ranks with different sigmas neither wait for each other nor lose a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train.ranks import run_ranks
from unirl.distributed import current
from unirl.models.chunks import select_conditions
from unirl.models.wan22.family import Wan22Bundle, Wan22Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.sampling import DiffusionSamplingParams

pytestmark = pytest.mark.slow
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(),
    num_inference_steps=4,
    height=32,
    width=32,
    num_frames=5,
    max_sequence_length=16,
)
APART = ((0.95, 0.9, 0.2, 0.1), (0.3, 0.99, 0.4, 0.6))
"""Levels of four rows in two micro-batches: in the first, two ranks need an expert each; in the second, one needs both,
the other one."""


def model(lora: bool) -> tuple[Wan22Pipeline, FSDPBackend]:
    pipeline = Wan22Pipeline(Wan22Bundle(path="toy", dtype="fp32"))
    backend = FSDPBackend(
        pipeline.bundle,
        seed=3,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64", activation_checkpointing=True),
        lora_cfg=LoraConfig(rank=4) if lora else None,
    )
    return pipeline, backend


def own(count: int) -> list[int]:
    """The rows of this rank: the first half are rank 0's."""
    share = count // current().dp_size
    return list(range(current().dp_rank * share, (current().dp_rank + 1) * share))


def gradients(backend: FSDPBackend) -> dict[str, Tensor]:
    """The gathered gradients of all ranks."""
    result = {}
    for name, parameter in backend.trainable.items():
        grad = backend.shards[name].grad
        result[name] = backend.sharding.whole(
            parameter, torch.zeros_like(backend.shards[name]) if grad is None else grad
        )
    return {name: grad.clone() for name, grad in result.items()}


def at_own_levels(lora: bool, passes: Sequence[Sequence[float]]) -> list[Any]:
    """Two updates of a forward-process loss; its gradients, norms, and what the weights then say without gradients."""
    pipeline, backend = model(lora)
    ids = [f"r{i}" for i in range(4)]
    conditions = pipeline.encode(["a", "b c", "", "d"], PARAMS)
    shape, mine = pipeline.facts.latent_shape(PARAMS), own(4)
    some, guidance = select_conditions(conditions, mine), pipeline.facts.guidance
    result: list[Any] = []
    for step in range(2):
        x, target = (NoiseSource(0, "r", step).normal(ids, name, shape) for name in "xt")
        total = torch.zeros((), dtype=torch.float64)
        for i, levels in enumerate(passes):
            with torch.no_grad():  # as an anchor is measured
                pipeline.stage.velocity(x[mine], torch.tensor(levels)[mine], some, guidance)
            v = pipeline.stage.velocity(x[mine], torch.tensor(levels)[mine], some, guidance)
            loss = (v - target[mine]).square().mean((1, 2, 3, 4)).sum() / 8
            backend.backward(loss, last=i == len(passes) - 1)
            total += loss.detach()
        result.append(gradients(backend))
        result.append(backend.step(1e9, total).grad_norm)
    return [*result, dict(backend.gather())]


def at_shared_levels(lora: bool, parts: Sequence[Sequence[int]]) -> list[Any]:
    """Two updates of a loss on replayed steps of another model's samples: no part need run every expert."""
    pipeline, backend = model(lora)
    track = rollout_of(Wan22Pipeline(Wan22Bundle(path="toy", dtype="fp32")), PARAMS).slice(0, 4)
    mine = own(4)
    some, segment = select_conditions(track.conditions, mine), track.segment.select(mine)
    result: list[Any] = []
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for i, steps in enumerate(parts):
            loss = pipeline.stage.replay(some, segment, steps).velocity.square().mean((2, 3, 4, 5)).sum() / 8
            backend.backward(loss, last=i == len(parts) - 1)
            total += loss.detach()
        result.append(gradients(backend))
        result.append(backend.step(1e9, total).grad_norm)
    return [*result, dict(backend.gather())]


def filled(path: str) -> dict[str, Tensor]:
    """Weights of a module that was built without storage."""
    bundle = Wan22Bundle(path=path, dtype="fp32", meta_init=True, components=())
    return dict(FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2)).gather())


def assert_equal(alone: list[Any], shared: list[Any]) -> None:
    for step in (0, 2):
        of_experts = {name.partition(".")[0]: 0.0 for name in alone[step]}
        for name, gradient in alone[step].items():
            scale = max(float(np.abs(gradient).max()), 1e-3)
            assert float(np.abs(gradient - shared[step][name]).max()) < 1e-4 * scale, name
            of_experts[name.partition(".")[0]] += float(np.abs(gradient).sum())
        assert set(of_experts) == {"transformer", "transformer_2"} and min(of_experts.values()) > 0
        assert shared[step + 1] == pytest.approx(alone[step + 1], rel=1e-5)
    assert all(np.abs(value - shared[4][name]).max() < 1e-4 for name, value in alone[4].items())


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("passes", [APART, APART[:1], APART[::-1]], ids=["both", "apart", "reversed"])
def test_ranks_with_different_sigmas_have_the_gradient_of_one(lora: bool, passes: Sequence[Sequence[float]]) -> None:
    [alone] = run_ranks(1, at_own_levels, lora, passes)
    for shared in run_ranks(2, at_own_levels, lora, passes):
        assert_equal(alone, shared)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("parts", [((0,), (2,)), ((2, 1), (0,)), ((0, 1, 2),)], ids=["fall", "rise", "mixed"])
def test_parts_that_run_one_expert_keep_the_gradient_of_the_other(lora: bool, parts: Sequence[Sequence[int]]) -> None:
    [alone] = run_ranks(1, at_shared_levels, lora, parts)
    for shared in run_ranks(2, at_shared_levels, lora, parts):
        assert_equal(alone, shared)


def test_ranks_fill_both_experts_from_the_folders_of_a_checkpoint(tmp_path: Path) -> None:
    pipeline = Wan22Pipeline(Wan22Bundle(path="toy", dtype="fp32"))
    weights = dict(pipeline.bundle.trainable().named_parameters())
    folder = pipeline.write_model(weights, tmp_path / "model")
    for result in run_ranks(2, filled, str(folder)):
        assert result.keys() == weights.keys()
        assert all(np.array_equal(result[name], value.detach().numpy()) for name, value in weights.items())
