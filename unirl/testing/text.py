"""Requests for text, small enough for tests of any language model."""

from __future__ import annotations

from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ARSamplingParams

TRACK = "text"


def text_params(**changes: object) -> ARSamplingParams:
    """Responses of at most 10 tokens, 4 per prompt."""
    values: dict[str, object] = {"max_new_tokens": 10, "samples_per_prompt": 4, "max_prompt_tokens": 256}
    return ARSamplingParams(**(values | changes))  # type: ignore[arg-type]


def text_request(prompts: int = 2, params: ARSamplingParams | None = None, step: int = 0) -> RolloutReq:
    """A training request for `prompts` prompts of different lengths, siblings adjacent."""
    params = params or text_params()
    groups = [f"p{i}@0" for i in range(prompts)]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=[f"How much is {10**i} + {i}?" for i in range(prompts)])},
        metadata=[{"answer": str(10**i + i)} for i in range(prompts)],
        tracks={TRACK: TrackSpec(sampling=params)},
        purpose="r",
        step=step,
        weights="live",
        weight_version=0,
    ).expand(params.samples_per_prompt)
