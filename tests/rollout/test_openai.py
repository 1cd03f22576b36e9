"""The engine for OpenAI-compatible servers over HTTP, with a fake server that can be told to make mistakes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fake_servers import openai as fake
from tests.sync_ends import placed
from unirl.config.errors import DependencyError, EngineError, IncompatibleError, SyncError, WeightsLostError
from unirl.config.load import load
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.plan.preflight import preflight
from unirl.rollout.engine.openai.densities import checked_gaps, processed, raw, tempered
from unirl.rollout.engine.openai.engine import OpenAIRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.language import text_params, text_request
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig
from unirl.types.rollout_req import RolloutReq
from unirl.types.segments import TextSegment

TOY = {"path": "toy", "dtype": "fp32"}
ATOL = 2e-5
"""Largest difference of log-probs of two fp32 forwards over other batches."""


@dataclass
class Served:
    """A trainer and an engine whose weights live in a server."""

    trained: Qwen3Pipeline
    backend: FSDPBackend
    engine: OpenAIRolloutEngine
    sync: EngineSync

    @staticmethod
    def at(folder: Path, lora: LoraConfig | None = None, program: str = "fake", **keys: object) -> Served:
        trained = Qwen3Pipeline(Qwen3Bundle(**TOY))
        backend = FSDPBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
        bundle = Qwen3Bundle(**TOY, meta_init=True)
        engine = OpenAIRolloutEngine(Qwen3Pipeline(bundle), folder, program=program, concurrency=8, **keys)
        sender = WeightSender(backend, trained.stage, engine)
        pool = open_pool("local", 2, deadline_s=600.0)
        sync = EngineSync(placed(pool, 0, "sender", sender), placed(pool, 1, "rollout", engine))
        return Served(trained, backend, engine, sync)

    def train(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.backend.trainable.values():
                parameter.add_(torch.empty(parameter.shape).normal_(std=0.05, generator=generator))
        self.backend.updates += 1

    def push(self) -> None:
        self.sync.push(self.backend.updates)

    def asking(self, **params: object) -> RolloutReq:
        return text_request(3, text_params(**params)).from_weights("live", self.backend.updates)

    def sampled(self, req: RolloutReq) -> TextSegment:
        return self.engine.generate(req).tracks["text"].sampled_as(TextSegment).segment

    def tokens(self, req: RolloutReq) -> list[list[int]]:
        segment = self.sampled(req)
        return [row.tolist() for row in segment.tokens.split(segment.lengths.tolist())]

    def log_prob_gap(self, req: RolloutReq) -> float:
        """The largest difference between the engine's log-probs and the trainer's replay."""
        track = self.engine.generate(req).tracks["text"].sampled_as(TextSegment)
        with torch.no_grad():
            replay = self.trained.stage.replay(track.conditions, track.segment)
        return float((track.segment.logp - replay.logp).abs().max())


@contextmanager
def serving(folder: Path, **keys: object) -> Iterator[Served]:
    """A trainer and an engine whose server ends with the block."""
    served = Served.at(folder, **keys)
    try:
        yield served
    finally:
        served.engine.server.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server in this process for the tests that leave it running."""
    with fake() as url, serving(tmp_path_factory.mktemp("run"), url=url) as served:
        yield served


def test_it_keeps_the_contract_of_an_engine(tmp_path) -> None:
    """Refusal before a push, log-probs equal to the replay's before and after an update, row bits, sleep, snapshots."""
    with fake() as url, serving(tmp_path, url=url) as served:
        served.engine.server.frees_memory = True  # as on a GPU
        req = text_request(8, text_params(samples_per_prompt=6))
        check_engine(served.engine, served.trained, served.backend, req, atol=ATOL)
        assert not list((tmp_path / "engine" / "openai-0").glob("0*"))  # the weights of a transfer are removed


def test_merged_adapters_keep_the_contract_too(tmp_path) -> None:
    with fake() as url, serving(tmp_path, url=url, lora=LoraConfig(rank=4, alpha=8.0)) as served:
        req = text_request(4, text_params(samples_per_prompt=4))
        check_engine(served.engine, served.trained, served.backend, req, atol=ATOL, merge_adapters=True)


def test_sampling_settings_reach_the_server(served) -> None:
    """Greedy tokens are the trainer's own, top_k=1 is greedy at any temperature; log-probs follow the temperature."""
    served.push()
    req = served.asking(temperature=0.0, samples_per_prompt=1)
    with torch.no_grad():
        theirs = served.trained.generate(req, 4).tracks["text"].segment
    ours = served.sampled(req)
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.finished, theirs.finished)
    truncated = served.asking(temperature=0.7, top_k=1, samples_per_prompt=1)
    assert torch.equal(served.sampled(truncated).tokens, theirs.tokens)
    assert served.log_prob_gap(served.asking(temperature=0.7)) < ATOL
    assert served.log_prob_gap(served.asking(temperature=0.7, top_k=5)) > 0.1  # which check_density refuses


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
    ("fault", "error", "says"),
    [
        ("other-temperature", SyncError, "the server took every tensor, but the forward of engine rank 0 differs"),
        ("other-model", SyncError, "the server took every tensor, but the forward of engine rank 0 differs"),
        ("wrong-dtype", SyncError, "did not arrive as it was sent: OpenAI-compatible server reports the checksum"),
        ("ignore-seeds", EngineError, "ignores seeds: it gives two responses for one seed"),
        ("fewer-tokens", IncompatibleError, r"its answer to a first request counts \d+ tokens, and has \d+: "),
        ("fewer-rows", IncompatibleError, "its answer to a first request has 0 responses, and one was asked for"),
        ("other-name", IncompatibleError, "is from the model 'another', and 'toy' was asked"),
        ("text-only", IncompatibleError, r"answers with texts alone \(it ignores return_token_ids\)"),
        ("no-logprobs", IncompatibleError, r"reports no log-probs \(it ignores logprobs\)"),
        ("slow", IncompatibleError, "gave no answer to a first request in 5 attempts"),
    ],
)
def test_a_lie_is_caught_when_weights_are_sent(tmp_path, fault, error, says) -> None:
    timeout = {"timeout_s": 0.5} if fault == "slow" else {}
    with fake(fault) as url, serving(tmp_path, url=url, **timeout) as served:
        with pytest.raises(error, match=says):
            served.push()
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())


def test_stale_weights_under_a_new_name_are_caught(tmp_path) -> None:
    with fake("stale-weights") as url, serving(tmp_path, url=url) as served:
        served.push()
        served.train()
        with pytest.raises(SyncError, match=r"did not arrive as it was sent.*It keeps old weights"):
            served.push()


def test_stale_weights_are_caught_where_the_server_cannot_give_checksums(tmp_path, monkeypatch) -> None:
    """On a CPU vLLM packs the linear layers: only the log-probs tell."""
    with fake("stale-weights") as url, serving(tmp_path, url=url) as served:
        monkeypatch.setattr(served.engine.server, "_checksums", lambda: [{}])
        served.push()
        served.train()
        with pytest.raises(SyncError, match="the forward of engine rank 0 differs"):
            served.push()


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("nan-logp", EngineError, r"needs as many log-probs <= 0: \[nan"),
        ("version-skew", SyncError, "from several weights, 000001-live-0-.*, another"),
    ],
)
def test_a_lie_is_caught_when_it_samples(tmp_path, fault, error, says) -> None:
    with fake(fault) as url, serving(tmp_path, url=url, deterministic=False) as served:
        served.push()
        with pytest.raises(error, match=says):
            served.sampled(served.asking())


def test_exchanged_rows_have_log_probs_that_the_replay_contradicts(tmp_path) -> None:
    with fake("swap-rows") as url, serving(tmp_path, url=url, deterministic=False) as served:
        served.push()
        assert served.log_prob_gap(served.asking(max_new_tokens=4)) > 0.1


@pytest.mark.parametrize("fault", ["half-answer", "close"])
def test_responses_that_are_broken_off_are_asked_for_again(served, tmp_path, fault) -> None:
    """With the same seeds, so that the answers are those of a server without faults."""
    served.push()
    expected = served.tokens(text_request(3, text_params()).from_weights("live", served.backend.updates))
    with fake(fault) as url, serving(tmp_path, url=url) as broken:
        broken.push()
        assert broken.tokens(broken.asking()) == expected


def test_two_runs_on_one_server_are_told_apart(tmp_path) -> None:
    with fake() as url, serving(tmp_path / "a", url=url) as first, serving(tmp_path / "b", url=url) as second:
        first.push()
        second.push()
        with pytest.raises(SyncError, match="another program may have loaded weights into the same server"):
            first.sampled(first.asking())


@pytest.mark.slow
def test_a_killed_server_gets_its_weights_again_and_gives_the_same_answers(tmp_path) -> None:
    with serving(tmp_path, max_restarts=1) as served:
        served.train()
        served.push()
        expected, process = served.tokens(served.asking()), served.engine.server.process
        os.killpg(process._process.pid, signal.SIGKILL)
        with pytest.raises(WeightsLostError, match="those of the last transfer must be sent again"):
            served.sampled(served.asking())
        served.push()
        assert served.tokens(served.asking()) == expected and process.num_starts == 2


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


def test_a_server_that_does_not_answer_is_named(tmp_path) -> None:
    refusal = pytest.raises(EngineError, match=r"no OpenAI-compatible server answers at rollout\.url=http://127")
    with serving(tmp_path, url="http://127.0.0.1:9") as served, refusal:
        served.push()


def test_the_command_line_follows_from_settings_and_model(tmp_path) -> None:
    keys = {"gpu_memory_utilization": 0.5, "context_length": 64, "engine_args": {"enforce_eager": True}, "tp_size": 2}
    served = Served.at(tmp_path, program="vllm", python_executable=sys.executable, **keys)
    server = served.engine.server
    server.prepare(WeightSender(served.backend, served.trained.stage).prepare(False))
    assert " ".join(server.words("/env/bin/python", 30000)) == (
        f"/env/bin/python -m vllm.entrypoints.cli.main serve {server.root} --host 127.0.0.1 --port 30000 "
        "--dtype float32 --served-model-name trained --tensor-parallel-size 2 --generation-config vllm "
        "--logprobs-mode processed_logprobs --gpu-memory-utilization 0.5 --max-model-len 64 --enforce-eager"
    )
    assert server.env()["VLLM_SERVER_DEV_MODE"] == "1"


def test_vllm_must_be_somewhere(tmp_path) -> None:
    with pytest.raises(DependencyError, match=r"unirl engines install vllm\."):
        Served.at(tmp_path, program="vllm")
