"""Requests for the models under test, and their rollouts."""

from __future__ import annotations

import torch

from unirl.models.sd3.family import SD3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ("a red circle", "two blue squares", "x")


def sampling(pipeline: SD3Pipeline, **changes: object) -> DiffusionSamplingParams:
    """Pinned parameters of a small picture: 5 steps, of which 0 and 2 are stochastic."""
    values: dict[str, object] = {
        "kernel": FlowSDEStrategy(),
        "num_inference_steps": 5,
        "height": 32,
        "width": 32,
        "max_sequence_length": 16,
        "sde_indices": (0, 2),
    }
    params = DiffusionSamplingParams(**(values | changes))  # type: ignore[arg-type]
    return params.pinned(0, tuple(pipeline.sigmas(params).tolist()))


def request_for(params: DiffusionSamplingParams, prompts: tuple[str, ...] = PROMPTS, per_prompt: int = 2) -> RolloutReq:
    """A training request of `per_prompt` samples per prompt."""
    groups = [f"p{i}@0" for i in range(len(prompts))]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=list(prompts))},
        metadata=[{} for _ in prompts],
        tracks={"image": TrackSpec(sampling=params, weight_version=3)},
        purpose="r",
        step=0,
    ).expand(per_prompt)


def roll(
    pipeline: SD3Pipeline,
    chunk_size: int = 8,
    prompts: tuple[str, ...] = PROMPTS,
    per_prompt: int = 2,
    **changes: object,
) -> RolloutTrack:
    """One rollout without gradients."""
    req = request_for(sampling(pipeline, **changes), prompts, per_prompt)
    with torch.no_grad():
        return pipeline.generate(req, chunk_size).tracks["image"]
