"""Sharded on two ranks, HunyuanImage-3 has the gradients and the updates of one rank, also if their experts differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.train.ranks import assert_two_ranks_train_as_one, gathered, own, run_ranks
from unirl.models.chunks import select_conditions
from unirl.models.hunyuan_image3.family import HunyuanImage3Bundle, HunyuanImage3Pipeline
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.stage import ARStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.conditions import Conditions
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

pytestmark = pytest.mark.slow
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, height=32, width=32, guidance_scale=3.0, max_sequence_length=16
)
WRITING = ARSamplingParams(max_new_tokens=5)
TEXTS = ("a red circle", "b", "", "four squares in a row")


def toy() -> HunyuanImage3Pipeline:
    return HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32"))


def trained(lora: bool) -> tuple[HunyuanImage3Pipeline, FSDPBackend]:
    pipeline = toy()
    backend = FSDPBackend(
        pipeline.bundle,
        seed=3,
        # With the default epsilon, an element whose gradient is rounding alone moves by a part of the learning rate.
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-6),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64", activation_checkpointing=True),
        lora_cfg=LoraConfig(rank=4) if lora else None,
    )
    return pipeline, backend


def images(lora: bool) -> list[Any]:
    """Two updates on replayed steps: the log-probs, the norms of the gradients, and the trained weights."""
    pipeline, backend = trained(lora)
    track = rollout_of(toy(), PARAMS).slice(0, 4)
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
    """The same on replayed responses, whose few tokens leave experts idle on one of two ranks."""
    pipeline, backend = trained(lora)
    stage, other = (each.bundle.stage_of("think") for each in (pipeline, toy()))
    assert isinstance(stage, ARStage) and isinstance(other, ARStage)
    conditions: Conditions = {"prompt": prompt_tokens([[256, 65 + i] for i in range(4)])}
    segment = other.sample(conditions, WRITING, NoiseSource(0, "r", 0), [f"r{i}" for i in range(4)], slots=4)
    mine = own(4)
    some, rows = select_conditions(conditions, mine), segment.select(mine)
    result: list[Any] = []
    for _ in range(2):
        loss = -stage.replay(some, rows).logp.sum() / 8
        backend.backward(loss, last=True)
        result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [*result, dict(backend.gather())]


def with_an_idle_expert(lora: bool) -> list[Any]:
    """Ranks whose tokens run different experts: the router of every layer follows the sign of one channel."""
    pipeline, backend = trained(lora)
    result: list[Any] = []
    used: list[list[int]] = []
    gate = pipeline.bundle.trainable().get_submodule("model.layers.1.mlp.gate")
    track = rollout_of(toy(), PARAMS).slice(0, 4)
    mine = own(4)
    some, segment = select_conditions(track.conditions, mine), track.segment.select(mine)
    experts = torch.tensor([[0, 1]] if mine[0] == 0 else [[2, 3]])

    def choose(module: Any, inputs: Any, output: Any) -> Any:
        rows = len(output[1])
        used.append(sorted(set(experts.flatten().tolist())))
        return torch.full((rows, 2), 0.5), experts.expand(rows, 2)

    with gate.register_forward_hook(choose):
        loss = pipeline.stage.replay(some, segment, segment.sde_indices).velocity.square().mean() / 2
        backend.backward(loss, last=True)
    result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [used[0], *result, dict(backend.gather())]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("policy", [images, texts], ids=["images", "texts"])
def test_two_ranks_train_as_one(policy: Any, lora: bool) -> None:
    assert_two_ranks_train_as_one(policy, lora, same_bits=policy is images)


def test_ranks_whose_tokens_run_different_experts_update_the_same_weights() -> None:
    first, second = run_ranks(2, with_an_idle_expert, False)
    assert (first[0], second[0]) == ([0, 1], [2, 3])
    assert first[1] == second[1] > 0
    before = dict(toy().bundle.trainable().named_parameters())
    for name, value in first[2].items():
        assert np.array_equal(value, second[2][name]), name
        if "layers.1.mlp.experts." in name:
            assert not np.array_equal(value, before[name].detach().numpy()), name
