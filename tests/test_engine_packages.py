"""The recorded comparison with the real package is about the messages that the engine sends and reads today."""

from __future__ import annotations

import json

import msgspec
import pytest

from scripts import check_diffusion_package, check_image_package, check_omni_package, check_openai_package
from scripts.check_engine_package import RECORD, distinct
from scripts.check_llm_package import CLASSES, requests_of_the_engine
from scripts.engine_client import Exchange, described
from tests import fake_servers
from unirl.config.http import HttpClient
from unirl.models.language.pipeline import PlainPrompt
from unirl.models.qwen3.family import Qwen3Bundle
from unirl.models.qwen_vl.family import QwenVLBundle
from unirl.rollout.engine.openai import messages as openai
from unirl.rollout.engine.serving.checksums import SentTensors
from unirl.rollout.engine.sglang_llm import messages
from unirl.rollout.engine.vllm_omni.server import VERSION

SGLANG = json.loads(RECORD.read_text())["sglang_llm"]
ANSWERS = SGLANG["live"]["answers"]
READ_AS = {
    "POST /generate": messages.Generated,
    "POST /generate of given tokens": messages.Generated,
    "POST /begin_weight_update": messages.Outcome,
    "POST /update_weights_from_tensor": messages.Outcome,
    "POST /end_weight_update": messages.Outcome,
    "POST /weights_checker": messages.Checksums,
    "POST /load_lora_adapter_from_tensors": messages.Outcome,
    "POST /unload_lora_adapter": messages.Outcome,
    "POST /update_weight_version": messages.Outcome,
    "GET /server_info": messages.ServerInfo,
    "GET /model_info": messages.ModelInfo,
}


def test_the_package_has_read_the_requests_that_the_engine_sends() -> None:
    """Write the record anew with scripts/check_engine_package.py after a change of the messages."""
    exchanges = requests_of_the_engine()
    assert SGLANG["requests"] == json.loads(json.dumps(distinct(exchanges)))
    sent = {path.partition("?")[0] for path in SGLANG["requests"]}
    assert set(SGLANG["requests_read"]) == sent == {*CLASSES, "/flush_cache"}


@pytest.mark.parametrize("name", sorted(READ_AS))
def test_the_engine_reads_the_answers_of_the_real_server(name) -> None:
    recorded = ANSWERS[name]
    read = msgspec.json.decode(json.dumps(recorded["body"]), type=READ_AS[name])
    assert recorded["status"] == 200
    assert set(READ_AS[name].__struct_fields__) >= set(msgspec.to_builtins(read))


def shape_of(value: object) -> object:
    """The keys and kinds of an answer, without its values. Numbers are one kind."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def test_the_fake_server_answers_with_the_keys_of_the_real_one() -> None:
    """Values that the real server leaves empty in one recording, such as details of its cache, may differ."""
    prompt = PlainPrompt([1, 2, 3], [1, 2, 3])
    body, scored = (
        messages.generate("r0", prompt, {"max_new_tokens": 1, "temperature": 0.0}, None, tokens)
        for tokens in (None, [4, 5])
    )
    with fake_servers.sglang() as url:
        http = HttpClient(url, token=None, timeout_s=30.0, connections=1)
        fakes = {
            "POST /generate": http.request("POST", "/generate", content=json.dumps(body).encode()),
            "POST /generate of given tokens": http.request("POST", "/generate", content=json.dumps(scored).encode()),
            "POST /begin_weight_update": http.request("POST", "/begin_weight_update", content=b"{}"),
            "POST /end_weight_update": http.request("POST", "/end_weight_update", content=b"{}"),
            "POST /weights_checker": http.request("POST", "/weights_checker", content=b'{"action":"checksum"}'),
        }
    for name, reply in fakes.items():
        ours, theirs = shape_of(json.loads(reply.body)), shape_of(ANSWERS[name]["body"])
        assert isinstance(ours, dict) and isinstance(theirs, dict)
        if "meta_info" in ours:
            ours["meta_info"].pop("cached_tokens_details")
            theirs["meta_info"].pop("cached_tokens_details")
        assert ours == theirs


def test_the_real_servers_checksums_are_those_that_the_engine_computes() -> None:
    """The record has the checksums of the initial weights of the tiny model."""
    sent = SentTensors(hashes_bytes=True)
    for name, tensor in Qwen3Bundle(path="toy", dtype="fp32").untrained().named_parameters():
        sent.add(name, tensor)
    [rank] = SGLANG["live"]["initial_checksums"]
    assert {name: sent.hashes[name].hexdigest()[:16] for name in sent.whole()} == rank


def test_the_real_server_was_as_exact_as_two_forwards_in_fp32_are() -> None:
    for result in SGLANG["live"]["results"].values():
        assert max(result["largest_logp_differences"].values()) < 5e-6


# OpenAI-compatible servers

OPENAI = json.loads(RECORD.read_text())["openai"]
OPENAI_ANSWERS = {
    "GET /v1/models": openai.ModelList,
    "POST /v1/completions": openai.ScoredCompletion,
    "llama.cpp GET /v1/models": openai.ModelList,
    "llama.cpp POST /v1/completions": openai.ScoredCompletion,
    "GET /weight_info": openai.WeightInfo,
    "POST /weight_checker": openai.WeightDigests,
}


@pytest.fixture(scope="module")
def openai_exchanges() -> list[Exchange]:
    return check_openai_package.requests_of_the_engine()


def test_vllm_has_read_the_requests_that_the_engine_sends(openai_exchanges) -> None:
    assert OPENAI["requests"] == json.loads(json.dumps(distinct(openai_exchanges)))
    assert set(OPENAI["requests_read"]) == {path.partition("?")[0] for path in OPENAI["requests"]}


@pytest.mark.parametrize("name", sorted(OPENAI_ANSWERS))
def test_the_engine_reads_the_answers_of_real_openai_servers(name) -> None:
    recorded = OPENAI["live"]["answers"][name]
    read = msgspec.json.decode(json.dumps(recorded["body"]), type=OPENAI_ANSWERS[name])
    assert recorded["status"] == 200
    if isinstance(read, openai.ScoredCompletion):
        [choice] = read.choices
        tokens, logps = openai.tokens_of(choice), openai.logps_of(choice)
        assert tokens and logps and len(tokens) == len(logps) == read.usage.completion_tokens


def test_the_fake_vllm_answers_with_the_keys_of_the_real_one(openai_exchanges) -> None:
    """vLLM 0.32, which was run, has no `weight_versions`; log-probs by text have texts as keys."""
    ours = next(each.answer for each in openai_exchanges if each.name == "POST /v1/completions")
    theirs = OPENAI["live"]["answers"]["POST /v1/completions"]["body"]
    assert set(ours) == set(theirs)
    [a], [b] = ours["choices"], theirs["choices"]
    assert set(a) - {"weight_versions"} == set(b) - {"weight_versions"}
    assert set(a["logprobs"]) == set(b["logprobs"]) and set(ours["usage"]) == set(theirs["usage"])


def test_the_real_openai_servers_were_as_exact_as_two_forwards_in_fp32_are() -> None:
    results = OPENAI["live"]["results"]
    assert set(results) == {"vllm, full", "vllm, merged", "llama.cpp"}
    for result in results.values():
        assert max(result["largest_logp_differences"].values()) < 5e-6


def test_the_real_server_drained_aborted_and_paused_requests_as_promised() -> None:
    """Three requests each; the first ones may end before the transfer. Log-probs tell which weights gave a token."""
    modes = SGLANG["live"]["results"]["full"]["in_flight"]
    drain, abort, pause = modes["drain"], modes["abort"], modes["pause"]
    assert len(set(drain["versions"])) == 1 and drain["of_new_weights"] == [0, 0, 0]
    assert len(set(abort["versions"])) == 1 and abort["of_new_weights"] == abort["tokens"]
    assert pause["versions"] == abort["versions"]  # those before the transfer
    assert any(0 < new < all_tokens for new, all_tokens in zip(pause["of_new_weights"], pause["tokens"], strict=True))


# Prompts with images

IMAGES = json.loads(RECORD.read_text())["sglang_llm_images"]


def test_the_package_has_read_the_requests_with_images() -> None:
    assert IMAGES["requests"] == json.loads(json.dumps(distinct(check_image_package.requests_of_the_engine())))
    assert IMAGES["requests_read"] == {"/generate": 3}


def test_the_engine_reads_the_answers_to_prompts_with_images() -> None:
    """The record has the answer to the prompt with one image, whose 12 tokens stand in it one by one."""
    recorded = IMAGES["live"]["answers"]["POST /generate with images"]
    answer = msgspec.json.decode(json.dumps(recorded["body"]), type=messages.Generated)
    image_token = QwenVLBundle.toys["toy"]["image_token_id"]
    assert recorded["status"] == 200 and answer.prompt_token_ids.count(image_token) in (12, 24)


def test_the_real_server_reads_images_as_exactly_as_two_forwards_in_fp32_do() -> None:
    results = IMAGES["live"]["results"]
    assert set(results) == {f"{model}, {kind}" for model in ("qwen3_vl", "qwen2_5_vl") for kind in ("full", "adapters")}
    for result in results.values():
        assert max(result["largest_logp_differences"].values()) < 5e-6


# SGLang's diffusion server

DIFFUSION = json.loads(RECORD.read_text())["sglang"]
SAMPLE_KEYS = {
    *("request_id", "prompt", "seed", "generated_output", "rollout_log_probs", "rollout_debug_tensors"),
    *("denoising_env", "dit_trajectory", "inference_time_s", "peak_memory_mb"),
}
"""The fields of `RolloutResponse` of the package."""


@pytest.fixture(scope="module")
def diffusion_exchanges() -> list[Exchange]:
    return check_diffusion_package.requests_of_the_engine()


def test_the_package_has_read_the_requests_of_the_diffusion_engine(diffusion_exchanges) -> None:
    assert DIFFUSION["requests"] == json.loads(json.dumps(distinct(diffusion_exchanges)))
    assert set(DIFFUSION["requests_read"]) == set(DIFFUSION["requests"]) == set(check_diffusion_package.CLASSES)


def test_the_fake_diffusion_server_answers_with_the_keys_of_the_real_one(diffusion_exchanges) -> None:
    """Paths that change the server have a message of their own each; the real one gives seconds and memory."""
    recorded = DIFFUSION["live"]["answers"]
    ours = {each.name: described(each.answer) for each in reversed(diffusion_exchanges)}
    assert set(ours) <= set(recorded) | {"GET /model_info"}
    for name in sorted(set(ours) & set(recorded)):
        a, b = ours[name], recorded[name]["body"]
        if name == "POST /rollout/generate":
            [a], [b] = a, b
            assert set(a) == set(b) == SAMPLE_KEYS - {"request_id", "inference_time_s"}
            a, b = a["dit_trajectory"], b["dit_trajectory"]
        assert shape_of(a) == shape_of(b), name


def test_the_real_diffusion_server_was_as_exact_as_two_forwards_in_fp32_are() -> None:
    results = DIFFUSION["live"]["results"]
    assert {name.partition(",")[0] for name in results} == {"sd3", "flux2_klein", "qwen_image"}
    for name, result in results.items():
        if name.endswith("bf16"):
            continue
        assert max(result["largest_logp_differences"].values()) < 1e-6
        assert result["euler_path"]["difference"] < 2e-6 * (1 + result["euler_path"]["largest_latent"])


# vLLM-Omni

OMNI = json.loads(RECORD.read_text())["vllm_omni"]


def test_the_package_has_read_the_requests_of_the_engine_for_vllm_omni() -> None:
    exchanges = check_omni_package.requests_of_the_engine()
    assert OMNI["requests"] == json.loads(json.dumps(distinct(exchanges)))
    assert set(OMNI["requests_read"]) == set(OMNI["requests"])
    assert OMNI["packages"]["vllm-omni"] == VERSION


def test_the_real_vllm_omni_was_as_exact_as_two_forwards_in_fp32_are() -> None:
    results = OMNI["live"]["results"]
    assert set(results) == {", ".join(case) for case in check_omni_package.CASES}
    for name, result in results.items():
        assert result["tensors_with_equal_fingerprints"] > 0
        if name.endswith("fp32"):
            assert max(result["largest_logp_differences"].values()) < 1e-6
