"""Two ranks that share a model's weights train every family as one process does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.family_cases import CASES, FamilyCase
from tests.train.ranks import run_ranks
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.distributed import current
from unirl.sde.kernels import FlowSDEStrategy
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.train.stack import TrainStack
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

pytestmark = pytest.mark.slow
NUM_ROWS, UPDATES = 4, 2
Results = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def trained(case: FamilyCase) -> dict[str, Any]:
    """Adapters after two updates on one rollout, of which each rank trains its rows."""
    pipeline = case.build()
    backend = FSDPBackend(
        pipeline.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-3),
        lora_cfg=LoraConfig(rank=4, alpha=8.0),
        fsdp_cfg=FSDPConfig(activation_checkpointing=True),
    )
    stack = TrainStack(backend, DiffusionGRPO(clip_range=0.9), pipeline.stage, micro_batch_size=2)
    height, width, frames = case.sizes[0]
    params = DiffusionSamplingParams(
        kernel=FlowSDEStrategy(),
        num_inference_steps=3,
        height=height,
        width=width,
        num_frames=frames,
        guidance_scale=case.scales[-1],
        max_sequence_length=case.max_sequence_length,
    )
    with backend.sampling():
        track = rollout_of(pipeline, params).slice(0, NUM_ROWS)
    rewards = -track.segment.final.float().square().flatten(1).mean(1)
    track = track.replace(rewards=rewards, component_rewards={"small": rewards}, advantages=rewards - rewards.mean())
    norms = []
    for _ in range(UPDATES):
        result = stack.train_track(own_rows(track))
        norms.append(result.metrics["train/grad_norm"].value)
    return {"adapters": dict(backend.gather("live")), "latents": track.segment.latents, "norms": norms}


def own_rows(track: RolloutTrack) -> RolloutTrack:
    share = NUM_ROWS // current().dp_size
    return track.slice(current().dp_rank * share, (current().dp_rank + 1) * share)


def all_families() -> list[dict[str, Any]]:
    return [trained(case) for case in CASES]


@pytest.fixture(scope="module")
def results() -> Results:
    """The results of one process and of the first of two, by family."""
    [alone] = run_ranks(1, all_families, deadline_s=600.0)
    first, second = run_ranks(2, all_families, deadline_s=600.0)
    assert len(first) == len(second)
    return alone, first


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_two_ranks_train_as_one(results: Results, index: int) -> None:
    alone, shared = (of[index] for of in results)
    assert np.array_equal(alone["latents"], shared["latents"])
    assert alone["norms"] == pytest.approx(shared["norms"], rel=1e-4) and min(alone["norms"]) > 0
    for name, tensor in alone["adapters"].items():
        assert np.abs(tensor - shared["adapters"][name]).max() < 1e-5, name
