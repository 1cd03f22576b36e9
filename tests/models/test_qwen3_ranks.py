"""Two ranks sample, replay and differentiate adapted and sharded Qwen3 networks as one rank does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.texts import prompts_of_lengths, sampled, segment_of_lengths
from tests.train.ranks import run_ranks
from unirl.distributed import current
from unirl.models.qwen3.family import Qwen3Bundle
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.sampling import ARSamplingParams

PROMPTS, RESPONSES = (5, 40, 3, 12, 7, 20), (9, 1, 30, 4, 2, 17)
PARAMS = ARSamplingParams(max_new_tokens=12)


def run(lora: bool, meta_init: bool) -> list[Any]:
    """After an update: a sample of this rank's rows, a replay of all, the update's gradient norm and its weights."""
    bundle = Qwen3Bundle(path="toy", dtype="fp32", meta_init=meta_init)
    backend = FSDPBackend(
        bundle,
        seed=3,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64", activation_checkpointing=True),
        lora_cfg=LoraConfig(rank=4) if lora else None,
    )
    stage, rank = bundle.stage(), current()
    mine = list(range(rank.dp_rank, len(PROMPTS), rank.dp_size))
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    some = {"prompt": conditions["prompt"].select(mine)}
    stats = None
    for _ in range(2):
        loss = -stage.replay(some, segment.select(mine), entropy=True).logp.sum() / 63
        backend.backward(loss, last=True)
        stats = backend.step(1e9, loss)
    with backend.sampling():
        drawn = sampled(stage, conditions, PARAMS, slots=2 + rank.dp_rank)  # ranks may take unequal numbers of steps
    with torch.no_grad():
        logp = stage.replay(conditions, segment).logp
    assert stats is not None
    return [drawn.tokens, drawn.logp, logp, stats.grad_norm, dict(backend.gather())]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_two_ranks_give_the_results_of_one(lora: bool) -> None:
    [alone] = run_ranks(1, run, lora, False)
    for result in run_ranks(2, run, lora, False):
        assert np.array_equal(result[0], alone[0]), "tokens"
        for i in (1, 2):
            np.testing.assert_allclose(result[i], alone[i], rtol=3e-6, atol=1e-5)
        assert abs(result[3] / alone[3] - 1) < 1e-5
        assert result[4].keys() == alone[4].keys()
        assert max(float(np.abs(result[4][name] - alone[4][name]).max()) for name in alone[4]) < 1e-4


@pytest.mark.slow
def test_two_ranks_fill_a_network_without_storage() -> None:
    [alone] = run_ranks(1, run, False, False)
    for result in run_ranks(2, run, False, True):
        assert np.array_equal(result[0], alone[0]) and float(np.abs(result[2] - alone[2]).max()) < 1e-5
