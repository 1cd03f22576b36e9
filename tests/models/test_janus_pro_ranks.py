"""Sharded on two ranks, Janus-Pro has the gradients and the updates of one rank, with and without guidance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_janus_pro import rollout
from tests.train.ranks import assert_two_ranks_train_as_one, gathered, own
from unirl.models.chunks import select_conditions
from unirl.models.janus_pro.family import JanusProBundle, JanusProPipeline
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.sampling import ImageTokenSamplingParams

pytestmark = pytest.mark.slow
TEXTS = ("a cat", "two red circles on a table")
SIBLINGS = 2
ROWS = len(TEXTS) * SIBLINGS


def toy() -> JanusProPipeline:
    return JanusProPipeline(JanusProBundle(path="toy", dtype="fp32"))


def images(lora: bool, scale: float) -> list[Any]:
    """Two updates on replayed image tokens: log-probs, norms, whole gradients of both, and the trained weights.

    The loss weighs every token of every image differently, so no rank can stand in for the other.
    """
    params = ImageTokenSamplingParams(max_new_tokens=16, height=32, width=32, guidance_scale=scale)
    track = rollout(toy(), params, texts=TEXTS, siblings=SIBLINGS)
    pipeline = toy()
    backend = FSDPBackend(
        pipeline.bundle,
        seed=3,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64", activation_checkpointing=True),
        lora_cfg=LoraConfig(rank=4) if lora else None,
    )
    mine = own(ROWS)
    conditions, segment = select_conditions(track.conditions, mine), track.segment.select(mine)
    factors = torch.linspace(-1.0, 2.0, len(track.segment.tokens)).unflatten(0, (ROWS, -1))[mine].flatten()
    result: list[Any] = []
    for _ in range(2):
        logp = pipeline.stage.replay(conditions, segment).logp
        result.append(gathered(logp.detach()))
        loss = -(factors * logp).sum() / len(track.segment.tokens)
        backend.backward(loss, last=True)
        result += [whole.clone() for whole in gradients(backend)]
        result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [*result, dict(backend.gather())]


def gradients(backend: FSDPBackend) -> Iterator[Tensor]:
    """The whole gradient of each trained parameter."""
    for name, parameter in backend.trainable.items():
        yield backend.sharding.whole(parameter, backend.shards[name].grad)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("scale", [1.0, 5.0], ids=["plain", "guided"])
def test_two_ranks_train_as_one(lora: bool, scale: float) -> None:
    assert_two_ranks_train_as_one(images, lora, scale, same_bits=True)
