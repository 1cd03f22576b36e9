"""Sharded on two ranks, BAGEL has the gradients, the updates and the bits of one rank, for images and for text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train.ranks import run_ranks
from unirl.distributed import current
from unirl.models.bagel.family import BagelBundle, BagelPipeline
from unirl.models.chunks import select_conditions
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.stage import ARStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

pytestmark = pytest.mark.slow
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, height=32, width=32, guidance_scale=3.0, max_sequence_length=16
)
WRITING = ARSamplingParams(max_new_tokens=5)
TEXTS = ("a red circle", "b", "", "four squares in a row")


def trained(lora: bool, text: bool) -> tuple[BagelPipeline, FSDPBackend]:
    pipeline = BagelPipeline(BagelBundle(path="toy", dtype="fp32", freeze_understanding=not text))
    targets: Any = ("self_attn.q_proj", "mlp.down_proj") if text else "model"
    backend = FSDPBackend(
        pipeline.bundle,
        seed=3,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64", activation_checkpointing=True),
        lora_cfg=LoraConfig(rank=4, target_modules=targets) if lora else None,
    )
    return pipeline, backend


def own(count: int) -> list[int]:
    """The rows of this rank."""
    share = count // current().dp_size
    return list(range(current().dp_rank * share, (current().dp_rank + 1) * share))


def images(lora: bool) -> list[Any]:
    """Two updates on replayed steps: the log-probs, the norms of the gradients, and the trained weights."""
    pipeline, backend = trained(lora, text=False)
    track = rollout_of(BagelPipeline(BagelBundle(path="toy", dtype="fp32")), PARAMS).slice(0, 4)
    mine = own(4)
    conditions, segment = select_conditions(track.conditions, mine), track.segment.select(mine)
    result: list[Any] = []
    for _ in range(2):
        replay = pipeline.stage.replay(conditions, segment, segment.sde_indices)
        result.append(gathered(replay.logp.detach()))
        loss = replay.velocity.square().mean((2, 3, 4)).sum() / 8
        backend.backward(loss, last=True)
        result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [*result, dict(backend.gather())]


def texts(lora: bool) -> list[Any]:
    """The same on replayed responses."""
    pipeline, backend = trained(lora, text=True)
    stage = pipeline.bundle.stage_of("text")
    assert isinstance(stage, ARStage)
    prompts = [pipeline.writing_prompt("think", text, {}) for text in TEXTS]
    conditions, ids = {"prompt": prompt_tokens(prompts)}, [f"r{i}" for i in range(4)]
    other = BagelBundle(path="toy", dtype="fp32").text_stage("text")
    segment = other.sample(conditions, WRITING, NoiseSource(0, "r", 0), ids, slots=4)
    mine = own(4)
    some, rows = select_conditions(conditions, mine), segment.select(mine)
    result: list[Any] = []
    for _ in range(2):
        logp = stage.replay(some, rows).logp
        loss = -logp.sum() / 8
        backend.backward(loss, last=True)
        result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [*result, dict(backend.gather())]


def gathered(rows: Tensor) -> Tensor:
    """The rows of all ranks, in order."""
    if current().dp_size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(current().dp_size)]
    torch.distributed.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("policy", [images, texts], ids=["images", "texts"])
def test_two_ranks_train_as_one(policy: Any, lora: bool) -> None:
    [alone] = run_ranks(1, policy, lora)
    for shared in run_ranks(2, policy, lora):
        *numbers, weights = alone
        for first, second in zip(numbers, shared[:-1], strict=True):
            np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-6)
        if policy is images:
            assert np.array_equal(shared[0], alone[0])  # before the first update the weights are equal to the bit
        assert weights.keys() == shared[-1].keys()
        assert all(np.abs(value - shared[-1][name]).max() < 1e-4 for name, value in weights.items())
        assert min(number for number in numbers if isinstance(number, float)) > 0
