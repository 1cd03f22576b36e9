"""A replica of a language model answers as the trainer would, token for token, over every path that weights travel."""

import pytest
import torch

from tests.sync_ends import LORA, Ends, ends
from unirl.config.errors import SyncError
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.testing.language import text_request
from unirl.types.fp8 import Fp8Linear
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ARSamplingParams

PATHS = {
    "in_process": {"colocated": True},
    "broadcast": {"colocated": False, "transport": "broadcast"},
    "shared_buffer": {"colocated": False, "transport": "cuda_ipc"},
}


def qwen_pipeline() -> Qwen3Pipeline:
    return Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32"))


def asking(joined: Ends) -> RolloutReq:
    return text_request(3).from_weights("live", joined.backend.updates)


def trainside(joined: Ends, req: RolloutReq, rows_at_once: int = 8) -> RolloutTrack:
    engine = TrainsideRolloutEngine(joined.trained, joined.backend, forward_batch_size=rows_at_once)
    return engine.generate(req).tracks["text"]


def assert_same(ours: RolloutTrack, theirs: RolloutTrack) -> None:
    assert ours.sample_ids == theirs.sample_ids
    assert torch.equal(ours.segment.tokens, theirs.segment.tokens)
    assert torch.equal(ours.segment.logp, theirs.segment.logp)
    assert torch.equal(ours.segment.finished, theirs.segment.finished)
    assert ours.decoded.texts == theirs.decoded.texts
    assert torch.equal(ours.weight_version, theirs.weight_version)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("path", PATHS)
def test_its_responses_are_trainsides_token_for_token(path, lora) -> None:
    joined = ends(lora, qwen_pipeline, **PATHS[path])
    for _ in range(2):
        joined.train()
        report = joined.sync.push(joined.backend.updates)
        assert report.num_bytes > 0 and report.canary_absdiff == 0.0
        req = asking(joined)
        ours = joined.engine.generate(req).tracks["text"]
        assert_same(ours, trainside(joined, req))
        assert len(set(ours.decoded.texts)) > 1


def test_responses_depend_on_the_weights_and_not_on_how_many_are_made_at_once() -> None:
    joined = ends(LORA, qwen_pipeline)
    joined.sync.push(0)
    req = asking(joined)
    before = joined.engine.generate(req).tracks["text"]
    assert_same(before, trainside(joined, req, rows_at_once=2))
    joined.train()
    after = trainside(joined, asking(joined))
    assert after.decoded.texts != before.decoded.texts


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_language_model_in_eight_bits_answers_from_nearly_the_same_distribution(lora) -> None:
    joined = ends(lora, qwen_pipeline, engine={"weight_dtype": "fp8"})
    joined.sync.push(0)
    track = joined.engine.generate(asking(joined)).tracks["text"]
    assert any(isinstance(layer, Fp8Linear) for layer in joined.network.modules())
    with torch.no_grad():
        gap = joined.trained.stage.replay(track.conditions, track.segment).logp - track.segment.logp
    assert 0.0 < float(gap.abs().max()) < 0.5


def test_another_base_model_is_caught_by_the_canary() -> None:
    joined = ends(LORA, qwen_pipeline, engine_pipeline=other_pipeline)
    with pytest.raises(SyncError, match="the forward of engine rank 0 differs from the trainer's"):
        joined.sync.push(0)


def other_pipeline() -> Qwen3Pipeline:
    pipeline = qwen_pipeline()
    with torch.no_grad():
        next(pipeline.bundle.trainable().parameters()).mul_(1.5)
    return pipeline


def test_a_narrow_engine_answers_within_tolerance() -> None:
    joined = ends(LORA, qwen_pipeline, engine={"dtype": "bf16"})
    report = joined.sync.push(0)
    assert 0.0 < report.canary_absdiff < 0.5
    track = joined.engine.generate(asking(joined)).tracks["text"]
    assert track.segment.logp.dtype == torch.float32


def test_greedy_evaluations_are_the_same_too() -> None:
    joined = ends(LORA, qwen_pipeline)
    joined.sync.push(0)
    req = text_request(2, ARSamplingParams(max_new_tokens=6, temperature=0.0))
    assert_same(joined.engine.generate(req).tracks["text"], trainside(joined, req))
