"""The SGLang engine over HTTP, with a fake server that can be told to make mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_servers import sglang as fake
from tests.sync_ends import placed
from unirl.config.errors import (
    DependencyError,
    EngineError,
    IncompatibleError,
    SyncError,
    WeightsLostError,
)
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.language.pipeline import TextPipeline
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.rollout.engine.serving import server
from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.language import text_params, text_request
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig
from unirl.types.rollout_req import RolloutReq
from unirl.types.segments import TextSegment

TOY = {"path": "toy", "dtype": "fp32"}
LORA = LoraConfig(rank=4, alpha=8.0)
ATOL = 2e-5
"""Largest difference of log-probs of two fp32 forwards over other batches."""


def tiny_qwen3(**keys: object) -> Qwen3Pipeline:
    return Qwen3Pipeline(Qwen3Bundle(**TOY, **keys))


@dataclass
class Served:
    """A trainer and an engine whose weights live in a server."""

    trained: TextPipeline[Any]
    backend: FSDPBackend
    engine: SGLangLLMRolloutEngine
    sync: EngineSync

    @staticmethod
    def at(
        folder: Path,
        lora: LoraConfig | None = None,
        program: str = "fake",
        model: Callable[..., TextPipeline[Any]] = tiny_qwen3,
        **keys: object,
    ) -> Served:
        trained = model()
        backend = FSDPBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
        engine = SGLangLLMRolloutEngine(model(meta_init=True), folder, program=program, concurrency=8, **keys)
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
        segment = self.engine.generate(req).tracks["text"].segment
        assert isinstance(segment, TextSegment)
        return segment

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
    """One server for the tests that leave it running."""
    with fake() as url, serving(tmp_path_factory.mktemp("run"), url=url) as each:
        yield each


def test_it_keeps_the_contract_of_an_engine(served) -> None:
    """Refusal before a push, log-probs equal to the replay's before and after an update, row bits, sleep, snapshots."""
    req = text_request(8, text_params(samples_per_prompt=6))
    check_engine(served.engine, served.trained, served.backend, req, atol=ATOL)


@pytest.mark.parametrize("merge", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["adapters", "merged"])
def test_adapters_keep_the_contract_too(tmp_path, merge) -> None:
    flags = ("--enable-lora", "--max-lora-rank", "4", "--max-loaded-loras", "2")
    with fake(None, *flags) as url, serving(tmp_path, url=url, lora=LORA) as served:
        req = text_request(4, text_params(samples_per_prompt=4))
        check_engine(served.engine, served.trained, served.backend, req, atol=ATOL, merge_adapters=merge)


def test_sampling_settings_reach_the_server(served) -> None:
    """Greedy tokens are the trainer's own, top_k=1 is greedy at any temperature, and log-probs ignore truncation."""
    served.push()
    req = served.asking(temperature=0.0, samples_per_prompt=1)
    with torch.no_grad():
        theirs = served.trained.generate(req, 4).tracks["text"].segment
    ours = served.sampled(req)
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.finished, theirs.finished)
    truncated = served.asking(temperature=0.7, top_k=1, samples_per_prompt=1)
    assert torch.equal(served.sampled(truncated).tokens, theirs.tokens)
    for params in ({"temperature": 0.7}, {"top_p": 0.3}, {"temperature": 1.3, "top_k": 5}):
        assert served.log_prob_gap(served.asking(**params)) < ATOL
    stop = served.trained.bundle.codec.spell(theirs.tokens[2:3].tolist())
    req = served.asking(temperature=0.0, samples_per_prompt=1, stop=(stop,))
    with torch.no_grad():
        theirs = served.trained.generate(req, 4).tracks["text"].segment
    ours = served.sampled(req)
    assert ours.finished[0] and torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.offsets, theirs.offsets)


def test_a_smallest_length_is_refused(served) -> None:
    """The server would leave the end tokens out of the log-probs."""
    served.push()
    with pytest.raises(IncompatibleError, match=r"Set sampling\.min_new_tokens=0"):
        served.sampled(served.asking(min_new_tokens=3))


# Mistakes of a server


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("other-temperature", SyncError, "the server took every tensor, but the forward of engine rank 0 differs"),
        ("other-model", SyncError, "the server took every tensor, but the forward of engine rank 0 differs"),
        ("wrong-dtype", SyncError, "did not arrive as it was sent: SGLang reports the checksum"),
        ("ignore-seeds", EngineError, "ignores seeds: it gives two responses for one seed"),
        ("fewer-tokens", EngineError, r"its answer to seed counts 16 tokens, and has the tokens .* \(15\)"),
        ("version-skew", SyncError, "sampled seed from several weights, 000001-live-0-.*, another"),
        ("slow", EngineError, "gave no answer to a probe in 5 attempts"),
    ],
)
def test_a_lie_is_caught_when_weights_are_sent(tmp_path, monkeypatch, fault, error, says) -> None:
    monkeypatch.setattr(server, "RETRY_DELAY_S", 0.01)
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


def test_a_stale_adapter_under_a_new_name_is_caught(tmp_path) -> None:
    """The server keeps no checksum of adapters, but computes with them."""
    flags = ("--enable-lora", "--max-lora-rank", "4", "--max-loaded-loras", "2")
    with fake("stale-weights", *flags) as url, serving(tmp_path, url=url, lora=LORA) as served:
        served.push()
        served.train()
        with pytest.raises(SyncError, match="the forward of engine rank 0 differs from the trainer's"):
            served.push()


def test_stale_weights_are_caught_without_a_known_checksum(tmp_path, monkeypatch) -> None:
    """On a GPU the checksums are SGLang's own: only that they change with the tensors can be checked."""
    with fake("stale-weights") as url, serving(tmp_path, url=url) as served:
        served.push()
        monkeypatch.setattr(served.engine.server.info, "device", "cuda")
        served.train()
        with pytest.raises(
            SyncError, match="was sent with new values, and SGLang reports the checksum of the old ones"
        ):
            served.push()


def test_a_log_prob_that_is_not_finite_is_caught(tmp_path) -> None:
    with fake("nan-logp") as url, serving(tmp_path, url=url) as served:
        served.push()
        with pytest.raises(EngineError, match=r"needs as many log-probs <= 0: \[nan"):
            served.sampled(served.asking())


def test_exchanged_rows_have_log_probs_that_the_replay_contradicts(tmp_path) -> None:
    """The names of the requests are right, so only the trainer can tell: its parity gate compares the log-probs."""
    with fake("swap-rows") as url, serving(tmp_path, url=url) as served:
        served.push()
        assert served.log_prob_gap(served.asking(max_new_tokens=4)) > 0.1


def test_responses_that_are_broken_off_are_asked_for_again(tmp_path) -> None:
    """With the same seeds, so that the answers are those of a server without faults."""
    tokens = []
    for fault in (None, "half-answer", "close"):
        with fake(fault) as url, serving(tmp_path, url=url) as served:
            served.push()
            tokens.append(served.tokens(served.asking()))
    assert tokens[1] == tokens[0] and tokens[2] == tokens[0]


@pytest.mark.slow
def test_a_server_that_is_gone_is_named(tmp_path) -> None:
    """The command starts a server in a process of its own, which kills itself while it generates."""
    words = [sys.executable, "-m", "unirl.cli", "engines", "fake", "--engine", "sglang_llm", "--fault", "die", "--"]
    words += ["--enable-deterministic-inference"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with serving(tmp_path, url=url) as served:
            served.push()
            with pytest.raises(EngineError, match=f"no SGLang answers at rollout.url={url}"):
                served.sampled(served.asking())
        assert process.wait(60) == -signal.SIGKILL


# Restarts and transfers that fail


@pytest.mark.slow
def test_a_killed_server_gets_its_weights_again_and_gives_the_same_answers(tmp_path) -> None:
    """kill -9 within a rollout: the engine asks for the weights, and the rollout is repeated with the same tokens."""
    with serving(tmp_path, max_restarts=1) as served:
        served.train()
        served.push()
        expected, process = served.tokens(served.asking()), served.engine.server.process
        kill_at(served, 5)
        with pytest.raises(WeightsLostError, match="those of the last transfer must be sent again"):
            served.sampled(served.asking())
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())
        served.push()
        assert served.tokens(served.asking()) == expected and process.num_starts == 2
        kill_at(served, 5)
        with pytest.raises(EngineError, match=r"(?s)ended by signal SIGKILL.*max_restarts=1 times.*sglang-0\.log"):
            served.sampled(served.asking())


@pytest.mark.slow
def test_a_server_that_dies_during_a_transfer_gets_all_of_it_again(tmp_path) -> None:
    with serving(tmp_path) as served:
        served.push()
        served.train()
        send, calls = served.engine.server.send_weights, []

        def killing(tensors):
            calls.append(len(tensors))
            if len(calls) == 1:
                os.killpg(served.engine.server.process._process.pid, signal.SIGKILL)
            send(tensors)

        served.engine.server.send_weights = killing
        served.push()
        assert len(calls) == 2 and served.log_prob_gap(served.asking()) < ATOL


def test_a_transfer_that_the_trainer_breaks_off_can_be_repeated(tmp_path) -> None:
    """The session of the server is still open then."""
    with fake() as url, serving(tmp_path, url=url) as served:
        served.sync.bucket_bytes = 1024
        served.push()
        served.train()
        tensors = served.backend.named_tensors

        def broken(payload, weights="live"):
            for number, pair in enumerate(tensors(payload, weights)):
                if number == 5:
                    raise RuntimeError("out of order")
                yield pair

        served.backend.named_tensors = broken
        with pytest.raises(RuntimeError, match="out of order"):
            served.push()
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())
        served.backend.named_tensors = tensors
        served.push()
        assert served.log_prob_gap(served.asking()) < ATOL


def test_two_runs_on_one_server_are_told_apart(tmp_path) -> None:
    """Both count their transfers from 1, and both push version 0: only the names of the runs differ."""
    with fake() as url, serving(tmp_path, url=url) as first, serving(tmp_path, url=url) as second:
        first.push()
        second.push()
        with pytest.raises(SyncError, match="another program may have loaded weights into the same server"):
            first.sampled(first.asking())
        first.engine.server.begin_weights("a transfer that stays open")
        second.train()
        with pytest.raises(SyncError, match="another run uses this server, or was killed during one"):
            second.push()


# Settings


@pytest.mark.parametrize(
    ("keys", "lora", "says"),
    [
        ({"seeds": False}, None, "ignores seeds"),
        ({}, LORA, r"cannot load adapters\. Start it with --enable-lora"),
        (
            {"dtype": "bf16"},
            None,
            r"computes in bfloat16, and bundle\.dtype is float32\. Start it with --dtype float32",
        ),
    ],
)
def test_a_server_with_other_settings_is_refused(tmp_path, keys, lora, says) -> None:
    refusal = pytest.raises(IncompatibleError, match=says)
    with fake(**keys) as url, serving(tmp_path, url=url, lora=lora) as served, refusal:
        served.push()


def test_a_server_without_the_memory_saver_cannot_sleep(served, monkeypatch) -> None:
    served.push()
    monkeypatch.setattr(served.engine.server.info, "enable_memory_saver", False)
    with pytest.raises(IncompatibleError, match=r"rollout\.enable_memory_saver=true"):
        served.engine.sleep()


def test_the_command_line_follows_from_settings_model_and_adapters(tmp_path) -> None:
    engine_args = {"attention_backend": "fa3", "disable_radix_cache": True, "cuda_graph_bs": [1, 2], "log_level": None}
    keys = {"mem_fraction_static": 0.5, "context_length": 64, "engine_args": engine_args, "tp_size": 2}
    served = Served.at(tmp_path, lora=LORA, program="sglang", python_executable=sys.executable, **keys)
    server = served.engine.server
    sender = WeightSender(served.backend, served.trained.stage)
    server.prepare(sender.prepare(False))
    words = " ".join(server.words("/env/bin/python", 30000))
    assert words == (
        f"/env/bin/python -m sglang.launch_server --model-path {server.root} --host 127.0.0.1 --port 30000 "
        "--dtype float32 --tp-size 2 --device cpu --mem-fraction-static 0.5 --context-length 64 "
        "--enable-deterministic-inference --enable-memory-saver --enable-weights-cpu-backup --enable-lora "
        "--max-lora-rank 4 --lora-target-modules k_proj o_proj q_proj v_proj --max-loaded-loras 2 "
        "--max-loras-per-batch 2 --attention-backend fa3 --disable-radix-cache --cuda-graph-bs 1 2"
    )


def test_sglang_must_be_somewhere(tmp_path) -> None:
    with pytest.raises(DependencyError, match=r"unirl engines install sglang\."):
        Served.at(tmp_path, program="sglang")


def test_a_tensor_that_the_checkpoint_lacks_is_refused(tmp_path) -> None:
    """The real server would ignore it without a word."""
    served = Served.at(tmp_path)
    layout = WeightSender(served.backend, served.trained.stage).prepare(False)
    tensors = {"model.layers.0.self_attn.qproj.weight": layout.tensors["model.layers.0.self_attn.q_proj.weight"]}
    with pytest.raises(
        SyncError, match=r"would ignore it\. Did you mean 'model\.layers\.0\.self_attn\.q_proj\.weight'"
    ):
        served.engine.server.prepare(replace(layout, tensors=tensors))


def kill_at(served: Served, count: int) -> None:
    """Kill the server with the request of that number."""
    server, asked = served.engine.server, []
    complete = type(server).complete

    def killing(request, params):
        asked.append(request.id)
        if len(asked) == count:
            os.killpg(server.process._process.pid, signal.SIGKILL)
        return complete(server, request, params)

    server.complete = killing
