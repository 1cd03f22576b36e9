"""Sharded on two ranks whose images differ in size, HunyuanImage-3 trains as on one, for answers and for edits."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tests.models.test_bagel_ranks import gathered, own
from tests.models.test_hunyuan_image3_vision import WRITING, answers, drawing, edits, pictures, request
from tests.train.ranks import run_ranks
from unirl.models.chunks import select_conditions
from unirl.models.hunyuan_image3_vision.family import HunyuanImage3VisionBundle, HunyuanImage3VisionPipeline
from unirl.models.language.stage import ARStage
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig

pytestmark = pytest.mark.slow


def toy() -> HunyuanImage3VisionPipeline:
    return HunyuanImage3VisionPipeline(HunyuanImage3VisionBundle(path="toy", dtype="fp32"), condition_size=32)


def trained(lora: bool) -> tuple[HunyuanImage3VisionPipeline, FSDPBackend]:
    pipeline = toy()
    backend = FSDPBackend(
        pipeline.bundle,
        seed=3,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64", activation_checkpointing=True),
        lora_cfg=LoraConfig(rank=4) if lora else None,
    )
    return pipeline, backend


def of_answers(lora: bool) -> list[Any]:
    """Two updates on replayed answers: the norms of the gradients, and the trained weights."""
    pipeline, backend = trained(lora)
    other, stage = toy(), pipeline.bundle.stage_of("text")
    assert isinstance(stage, ARStage)
    with TemporaryDirectory() as folder:
        track = answers(other, request(pictures(Path(folder)), {"text": WRITING}))
    mine = own(4)
    some, rows = select_conditions(track.conditions, mine), track.segment.select(mine)
    result: list[Any] = []
    for _ in range(2):
        loss = -stage.replay(some, rows).logp.sum() / 8
        backend.backward(loss, last=True)
        result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [*result, dict(backend.gather())]


def of_edits(lora: bool) -> list[Any]:
    """The same on replayed steps of edited images, and their log-probs before each update."""
    pipeline, backend = trained(lora)
    other = toy()
    with TemporaryDirectory() as folder:
        track = edits(other, request(pictures(Path(folder)), drawing(other)))
    mine = own(4)
    some, segment = select_conditions(track.conditions, mine), track.segment.select(mine)
    result: list[Any] = []
    for _ in range(2):
        replay = pipeline.stage.replay(some, segment, segment.sde_indices)
        result.append(gathered(replay.logp.detach()))
        loss = replay.velocity.square().mean((2, 3, 4)).sum() / 8
        backend.backward(loss, last=True)
        result.append(backend.step(1e9, loss.detach().double()).grad_norm)
    return [*result, dict(backend.gather())]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("policy", [of_answers, of_edits], ids=["answers", "edits"])
def test_two_ranks_train_as_one(policy: Any, lora: bool) -> None:
    [alone] = run_ranks(1, policy, lora)
    for shared in run_ranks(2, policy, lora):
        *numbers, weights = alone
        for first, second in zip(numbers, shared[:-1], strict=True):
            np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-6)
        if policy is of_edits:
            assert np.array_equal(shared[0], alone[0])  # before the first update the weights are equal to the bit
        assert weights.keys() == shared[-1].keys()
        assert all(np.abs(value - shared[-1][name]).max() < 1e-4 for name, value in weights.items())
        assert min(number for number in numbers if isinstance(number, float)) > 0
