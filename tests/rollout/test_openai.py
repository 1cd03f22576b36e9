"""The engine for OpenAI-compatible servers over HTTP, with a fake server that can be told to make mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests import served_tokens
from tests.fake_servers import openai as fake
from tests.served_tokens import ATOL, FAKE, LORA, Served
from unirl.config.errors import IncompatibleError, SyncError
from unirl.config.load import load
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.plan.preflight import preflight
from unirl.rollout.engine.openai.densities import checked_gaps, processed, raw, tempered
from unirl.rollout.engine.openai.engine import OpenAIRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.language import text_params, text_request

serving = partial(served_tokens.serving, OpenAIRolloutEngine, **FAKE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server in this process for the tests that leave it running."""
    with fake() as url, serving(tmp_path_factory.mktemp("run"), url=url) as served:
        yield served


def test_merged_adapters_keep_the_contract_too(tmp_path) -> None:
    with fake() as url, serving(tmp_path, url=url, lora=LORA) as served:
        req = text_request(4, text_params(samples_per_prompt=4))
        check_engine(served.engine, served.trained, served.backend, req, atol=ATOL, merge_adapters=True)


def test_log_probs_of_truncated_draws_are_those_of_the_tokens_that_are_left(served) -> None:
    """So check_density refuses such settings."""
    served.push()
    assert served.log_prob_gap(served.asking(temperature=0.7, top_k=5)) > 0.1


# A server that keeps its weights


def test_a_server_without_control_samples_from_the_weights_of_the_start(tmp_path) -> None:
    with fake("no-dev-mode", logprobs="raw_logprobs") as url:
        keys = {"url": url, "control": "none", "logprobs": "raw"}
        with serving(tmp_path, **keys) as served:
            served.push()
            assert served.log_prob_gap(served.asking()) < ATOL
            served.backend.snapshot("start")
            served.train()
            served.sync.push(served.backend.updates, "start")  # the same weights under another name
            with pytest.raises(SyncError, match=r"has no endpoint for weights \(rollout\.control=none\)"):
                served.push()
        with serving(tmp_path, **keys) as other:
            other.train()
            with pytest.raises(SyncError, match="the forward of engine rank 0 differs"):
                other.push()


def test_a_server_without_endpoints_for_weights_is_refused(tmp_path) -> None:
    refusal = pytest.raises(IncompatibleError, match=r"VLLM_SERVER_DEV_MODE=1, or set rollout\.control=none")
    with fake("no-dev-mode") as url, serving(tmp_path, url=url) as served, refusal:
        served.push()


# Mistakes of a server


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fewer-rows", "its answer to a first request has 0 responses, and one was asked for"),
        ("other-name", "is from the model 'another', and 'toy' was asked"),
        ("text-only", r"answers with texts alone \(it ignores return_token_ids\)"),
        ("no-logprobs", r"reports no log-probs \(it ignores logprobs\)"),
    ],
)
def test_a_lie_is_caught_when_it_starts(tmp_path, fault, says) -> None:
    with fake(fault) as url, serving(tmp_path, url=url) as served, pytest.raises(IncompatibleError, match=says):
        served.push()


def test_stale_weights_are_caught_where_the_server_cannot_give_checksums(tmp_path, monkeypatch) -> None:
    """On a CPU vLLM packs the linear layers: only the log-probs tell."""
    with fake("stale-weights") as url, serving(tmp_path, url=url) as served:
        monkeypatch.setattr(served.engine.server, "checksums", lambda: [{}])
        served.push()
        served.train()
        with pytest.raises(SyncError, match="the forward of engine rank 0 differs"):
            served.push()


# The distribution of log-probs


def test_the_distribution_of_log_probs_is_recognised() -> None:
    """Oracle: the three definitions, written out. The fifth token is left out by top_k, and never drawn."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=torch.float64)
    kept = (logits[:4] / 2).exp()
    exact = {
        "raw": logits.log_softmax(0),
        "tempered": (logits / 2).log_softmax(0),
        "processed": torch.cat([(kept / kept.sum()).log(), torch.tensor([-torch.inf], dtype=torch.float64)]),
    }
    for kind, function in (("raw", raw), ("tempered", tempered), ("processed", processed)):
        assert torch.allclose(function(logits)[:4], exact[kind][:4])
        drawn = [(token, float(exact[kind][token])) for token in (0, 3, 1)]
        assert checked_gaps("S", kind, logits, drawn).abs().max() < 1e-12
        for other in set(exact) - {kind}:
            with pytest.raises(IncompatibleError, match=rf"S reports {kind} log-probs, and rollout\.logprobs={other}"):
                checked_gaps("S", other, logits, drawn)


def test_a_server_with_another_distribution_is_refused(tmp_path) -> None:
    refusal = pytest.raises(IncompatibleError, match=r"reports raw log-probs, and rollout\.logprobs=processed")
    with fake(logprobs="raw_logprobs") as url, serving(tmp_path, url=url) as served, refusal:
        served.push()


# Settings

URL = "rollout.url=http://127.0.0.1:9"
FROZEN = (URL, "rollout.control=none")
OFF = ("num_rollouts=1", "evaluation.eval_steps=0")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*FROZEN, "num_rollouts=2"), "samples from 3 different ones"),
        ((*FROZEN, "num_rollouts=1", "evaluation.eval_steps=1"), "samples from 2 different ones"),
        (("rollout.control=none",), "is for a server that runs already: set rollout.url"),
        (("rollout.model=m",), "Leave rollout.model out"),
        (("rollout.logprobs=tempered",), "vLLM, which the engine starts, reports raw or processed"),
        (("sampling.top_p=0.9",), r"losses need those of all tokens. Remove sampling.top_p"),
        (("rollout.logprobs=raw", "sampling.temperature=0.7"), "log-probs at temperature 1"),
        (("sampling.temperature=2.5",), "take at most 2"),
        (("sampling.min_new_tokens=2",), "Set sampling.min_new_tokens=0"),
        (("backend.lora_cfg={}",), "Set sync.merge_adapters=true"),
        ((URL, "num_devices=2"), "is one server, and 2 devices"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(overrides, says) -> None:
    with pytest.raises(IncompatibleError) as caught:
        preflight(load("llm/quickstart", ["rollout=openai", *overrides]))
    assert says in str(caught.value)


@pytest.mark.parametrize("overrides", [OFF, ("num_rollouts=5", "weight_sync_interval=5", "evaluation.eval_steps=0")])
def test_a_run_from_the_weights_of_the_start_alone_is_allowed(overrides) -> None:
    preflight(load("llm/quickstart", ["rollout=openai", *FROZEN, *overrides]))


def test_another_model_name_is_refused(tmp_path) -> None:
    refusal = pytest.raises(IncompatibleError, match=r"rollout\.model=toys: .* has no such model\. Did you mean 'toy'")
    with fake() as url, serving(tmp_path, url=url, model="toys") as served, refusal:
        served.push()


def test_the_command_line_follows_from_settings_and_model(tmp_path) -> None:
    keys = {"gpu_memory_utilization": 0.5, "context_length": 64, "engine_args": {"enforce_eager": True}, "tp_size": 2}
    served = Served.at(OpenAIRolloutEngine, tmp_path, program="vllm", python_executable=sys.executable, **keys)
    server = served.engine.server
    server.prepare(WeightSender(served.backend, served.trained.stage).prepare(False))
    assert " ".join(server.words("/env/bin/python", 30000)) == (
        f"/env/bin/python -m vllm.entrypoints.cli.main serve {server.root} --host 127.0.0.1 --port 30000 "
        "--dtype float32 --served-model-name trained --tensor-parallel-size 2 --generation-config vllm "
        "--logprobs-mode processed_logprobs --gpu-memory-utilization 0.5 --max-model-len 64 --enforce-eager"
    )
    assert server.env()["VLLM_SERVER_DEV_MODE"] == "1"
