"""Sharded on two ranks, BAGEL has the gradients, the updates and the bits of one rank, for images and for text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.ranks import assert_two_ranks_train_as_one, gathered, own
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


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("policy", [images, texts], ids=["images", "texts"])
def test_two_ranks_train_as_one(policy: Any, lora: bool) -> None:
    assert_two_ranks_train_as_one(policy, lora, same_bits=policy is images)
