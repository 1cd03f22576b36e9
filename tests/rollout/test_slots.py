"""How many rows an engine samples at a time if the recipe does not say."""

import pytest

from tests.models.texts import request
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.models.sd3.family import SD3Bundle
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.sde.kernels import FlowSDEStrategy
from unirl.testing.second_device import second_devices
from unirl.types import facts
from unirl.types.device import CPU, accelerator
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

GIB = 2**30


@pytest.mark.parametrize(
    ("prompt", "response", "slots"),
    [(64, 64, 256), (512, 512, 168), (1024, 1024, 80), (1024, 8192, 16), (9999, 20480, 8)],
)
def test_the_slots_of_a_4b_model_fit_24_gib(prompt, response, slots):
    model = Qwen3Bundle.facts_of("Qwen/Qwen3-4B-Base")
    params = ARSamplingParams(max_prompt_tokens=prompt, max_new_tokens=response)
    assert model.rows_at_once(params, dtype_bytes=2) == slots
    per_slot = 36 * 2 * 8 * 128 * 2 * (prompt + response)  # layers, keys and values, heads, width, bytes, tokens
    assert slots in (8, 256) or slots * per_slot <= 24 * GIB < (slots + 8) * per_slot


def test_a_denoiser_runs_eight_rows():
    assert SD3Bundle.facts_of("toy").rows_at_once(DiffusionSamplingParams(kernel=FlowSDEStrategy()), 2) == 8


@pytest.mark.parametrize(
    ("on_device", "setting", "rows"), [(False, "auto", 8), (True, "auto", 48), (True, 5, 5), (False, 5, 5)]
)
def test_an_engine_takes_as_many_slots_as_the_cache_holds(on_device, setting, rows, monkeypatch):
    params = ARSamplingParams(max_prompt_tokens=100, max_new_tokens=28)
    with second_devices():
        pipeline = Qwen3Pipeline(Qwen3Bundle(accelerator() if on_device else CPU, path="toy", dtype="fp32"))
        slot_bytes = 128 * pipeline.facts.cache_width * 4
        monkeypatch.setattr(facts, "CACHE_BYTES", 50 * slot_bytes)
        sizes = []
        generate = pipeline.generate
        monkeypatch.setattr(pipeline, "generate", lambda req, size: sizes.append(size) or generate(req, size))
        ReplicaRolloutEngine(pipeline, forward_batch_size=setting).sample(request(params))
    assert sizes == [rows]
