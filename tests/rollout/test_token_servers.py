"""The contract of all engines with a server of a checkpoint, over HTTP, with fake servers that can make mistakes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fake_servers
from tests.processes import wait_until
from tests.served_tokens import ATOL, FAKE, Served, serving
from tests.warm_servers import WarmProcess
from unirl.config.errors import DependencyError, EngineError, IncompatibleError, SyncError, WeightsLostError
from unirl.rollout.engine.openai.engine import OpenAIRolloutEngine
from unirl.rollout.engine.serving import server
from unirl.rollout.engine.serving.tokens import TokenServingEngine
from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.language import text_params, text_request

Lie = tuple[type[Exception], str]


@dataclass(frozen=True)
class Kind:
    """One engine."""

    name: str
    """The name of its fake server."""
    environment: str
    """The name of the environment of its server, and of the program."""
    engine: type[TokenServingEngine]
    fake: Callable[..., AbstractContextManager[str]]
    brings_weights: str
    """The path of the requests that bring weights."""
    flags: tuple[str, ...]
    """The arguments that its fake server needs in a process of its own."""
    lies: Mapping[str, Lie]
    """Fault of the server to the error, where engines do not share it."""

    def serving(self, folder: Path, **keys: Any) -> AbstractContextManager[Served]:
        return serving(self.engine, folder, **FAKE, **keys)


SGLANG = Kind(
    "sglang_llm",
    "sglang",
    SGLangLLMRolloutEngine,
    fake_servers.sglang,
    "/update_weights_from_tensor",
    ("--enable-deterministic-inference",),
    {
        "wrong-dtype": (SyncError, "did not arrive as it was sent: SGLang reports the checksum"),
        "fewer-tokens": (EngineError, r"its answer to seed counts 16 tokens, and has the tokens .* \(15\)"),
        "slow": (EngineError, "gave no answer to a probe in 5 attempts"),
    },
)
OPENAI = Kind(
    "openai",
    "vllm",
    OpenAIRolloutEngine,
    fake_servers.openai,
    "/collective_rpc",
    ("--logprobs-mode", "processed_logprobs"),
    {
        "wrong-dtype": (SyncError, "did not arrive as it was sent: OpenAI-compatible server reports the checksum"),
        "fewer-tokens": (IncompatibleError, r"its answer to a first request counts \d+ tokens, and has \d+: "),
        "slow": (IncompatibleError, "gave no answer to a first request in 5 attempts"),
    },
)
OTHER_FORWARD = (SyncError, "the server took every tensor, but the forward of engine rank 0 differs")
LIES: Mapping[str, Lie] = {
    "other-temperature": OTHER_FORWARD,
    "other-model": OTHER_FORWARD,
    "ignore-seeds": (EngineError, "ignores seeds: it gives two responses for one seed"),
    "version-skew": (SyncError, "sampled seed from several weights, 000001-live-0-.*, another"),
}
"""Fault of a server to the error of every engine."""


@pytest.fixture(scope="module", params=[SGLANG, OPENAI], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    each = request.param
    assert isinstance(each, Kind)
    return each


@pytest.fixture(scope="module")
def served(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it running."""
    with kind.fake() as url, kind.serving(tmp_path_factory.mktemp("run"), url=url) as each:
        yield each


def test_it_keeps_the_contract_of_an_engine(kind, tmp_path) -> None:
    """Refusal before a push, log-probs equal to the replay's before and after an update, row bits, sleep, snapshots."""
    with kind.fake() as url, kind.serving(tmp_path, url=url) as served:
        served.engine.server.frees_memory = True  # as on a GPU; only the engine for OpenAI-compatible servers reads it
        req = text_request(8, text_params(samples_per_prompt=2))
        check_engine(served.engine, served.trained, served.backend, req, atol=ATOL)
        assert not list((tmp_path / "engine").glob("*/0*"))  # the weights of a transfer are removed


def test_greedy_samples_are_the_trainers_own(served) -> None:
    """top_k=1 is greedy at any temperature; a stop string ends the response at the token that completes it."""
    served.push()
    stop = (served.trained.bundle.codec.spell(served.tokens(served.asking(temperature=0.0))[0][2:3]),)
    for params in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}, {"temperature": 0.0, "stop": stop}):
        greedy = {**params, "temperature": 0.0, "samples_per_prompt": 1}
        with torch.no_grad():
            theirs = served.trained.generate(served.asking(**greedy), 4).tracks["text"].segment
        ours = served.sampled(served.asking(**params, samples_per_prompt=1))
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.finished, theirs.finished)
        assert torch.equal(ours.offsets, theirs.offsets)


def test_log_probs_follow_the_temperature(served) -> None:
    served.push()
    assert served.log_prob_gap(served.asking(temperature=0.7)) < ATOL


def test_a_smallest_length_is_refused(served) -> None:
    """The server would leave the end tokens out of the log-probs."""
    served.push()
    with pytest.raises(IncompatibleError, match=r"Set sampling\.min_new_tokens=0"):
        served.sampled(served.asking(min_new_tokens=3))


# Mistakes of a server


@pytest.mark.parametrize(
    "fault",
    ["other-temperature", "other-model", "wrong-dtype", "ignore-seeds", "fewer-tokens", "version-skew", "slow"],
)
def test_a_lie_is_caught_when_weights_are_sent(kind, tmp_path, monkeypatch, fault) -> None:
    monkeypatch.setattr(server, "RETRY_DELAY_S", 0.01)
    error, says = {**LIES, **kind.lies}[fault]
    timeout = {"timeout_s": 0.5} if fault == "slow" else {}
    with kind.fake(fault) as url, kind.serving(tmp_path, url=url, **timeout) as served:
        with pytest.raises(error, match=says):
            served.push()
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())


def test_weights_that_never_arrive_are_named(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server, "RETRY_DELAY_S", 0.01)
    with kind.fake("no-weights") as url, kind.serving(tmp_path, url=url) as served:
        says = (
            rf"the weights .000001-live-0-\w+. did not arrive: .* gave no answer to {kind.brings_weights} in 5 attempts"
        )
        with pytest.raises(SyncError, match=says):
            served.push()
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())


def test_stale_weights_under_a_new_name_are_caught(kind, tmp_path) -> None:
    with kind.fake("stale-weights") as url, kind.serving(tmp_path, url=url) as served:
        served.push()
        served.train()
        with pytest.raises(SyncError, match=r"did not arrive as it was sent.*It keeps old weights"):
            served.push()


def test_a_log_prob_that_is_not_finite_is_caught(kind, tmp_path) -> None:
    with kind.fake("nan-logp") as url, kind.serving(tmp_path, url=url) as served:
        served.push()
        with pytest.raises(EngineError, match=r"needs as many log-probs <= 0: \[nan"):
            served.sampled(served.asking())


def test_exchanged_rows_have_log_probs_that_the_replay_contradicts(kind, tmp_path) -> None:
    """The names of the requests are right, so only the trainer can tell: its parity gate compares the log-probs."""
    with kind.fake("swap-rows") as url, kind.serving(tmp_path, url=url, deterministic=False) as served:
        served.push()
        assert served.log_prob_gap(served.asking(max_new_tokens=4)) > 0.1


def test_responses_that_are_broken_off_are_asked_for_again(kind, tmp_path) -> None:
    """With the same seeds, so that the answers are those of a server without faults."""
    tokens = []
    for fault in (None, "half-answer", "close"):
        with kind.fake(fault) as url, kind.serving(tmp_path, url=url) as served:
            served.push()
            tokens.append(served.tokens(served.asking()))
    assert tokens[1] == tokens[0] and tokens[2] == tokens[0]


def test_two_runs_on_one_server_are_told_apart(kind, tmp_path) -> None:
    """Both count their transfers from 1, and both push version 0: only the names of the runs differ."""
    with (
        kind.fake() as url,
        kind.serving(tmp_path / "a", url=url) as first,
        kind.serving(tmp_path / "b", url=url) as second,
    ):
        first.push()
        second.push()
        with pytest.raises(SyncError, match="another program may have loaded weights into the same server"):
            first.sampled(first.asking())


# Servers that end, and transfers that fail


@pytest.mark.slow
def test_a_server_that_is_gone_is_named(kind, tmp_path) -> None:
    """The command starts a server in a process of its own, which kills itself while it generates."""
    words = ["-m", "unirl.cli", "engines", "fake", "--engine", kind.name, "--fault", "die", "--", *kind.flags]
    process = WarmProcess(words, tmp_path / "log", os.environ)
    assert wait_until(lambda: "\n" in (tmp_path / "log").read_text(), 60)
    url = (tmp_path / "log").read_text().split()[0]
    gone = pytest.raises(EngineError, match=f"no {kind.engine.server_class.name} answers at rollout.url={url}")
    with kind.serving(tmp_path, url=url) as served, gone:
        served.push()  # the probe may ask for the tenth response already
        served.sampled(served.asking())
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_server_gets_its_weights_again_and_gives_the_same_answers(kind, tmp_path) -> None:
    """kill -9 within a rollout: the engine asks for the weights, and the rollout is repeated with the same tokens."""
    with kind.serving(tmp_path, max_restarts=1) as served:
        served.train()
        served.push()
        expected, process = served.tokens(served.asking()), served.engine.server.process
        kill_at(served, "complete", 5)
        with pytest.raises(WeightsLostError, match="those of the last transfer must be sent again"):
            served.sampled(served.asking())
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())
        served.push()
        assert served.tokens(served.asking()) == expected and process.num_starts == 2
        kill_at(served, "complete", 5)
        with pytest.raises(EngineError, match=r"(?s)ended by signal SIGKILL.*max_restarts=1 times.*log is .*-0\.log"):
            served.sampled(served.asking())


@pytest.mark.slow
def test_a_server_that_dies_during_a_transfer_gets_all_of_it_again(kind, tmp_path) -> None:
    with kind.serving(tmp_path) as served:
        served.push()
        served.train()
        calls = kill_at(served, "send_weights", 1)
        served.push()
        assert len(calls) == 2 and served.log_prob_gap(served.asking()) < ATOL


def kill_at(served: Served, method: str, count: int) -> list[object]:
    """Kill the server with the call of that number of one of its methods. Returns the calls, as they come."""
    server, calls = served.engine.server, []
    plain = vars(type(server))[method]

    def killing(*args):
        calls.append(args)
        if len(calls) == count:
            os.killpg(server.process._process.pid, signal.SIGKILL)
        return plain(server, *args)

    vars(server)[method] = killing
    return calls


def test_a_transfer_that_the_trainer_breaks_off_can_be_repeated(kind, tmp_path) -> None:
    """A session of the server may still be open then."""
    with kind.fake() as url, kind.serving(tmp_path, url=url) as served:
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


# The start


def test_a_server_that_does_not_answer_is_named(kind, tmp_path) -> None:
    with kind.serving(tmp_path, url="http://127.0.0.1:9") as served:
        name = served.engine.server.name
        with pytest.raises(EngineError, match=rf"no {name} answers at rollout\.url=http://127"):
            served.push()


def test_its_program_must_be_somewhere(kind, tmp_path) -> None:
    with pytest.raises(DependencyError, match=rf"unirl engines install {kind.environment}\."):
        Served.at(kind.engine, tmp_path, program=kind.environment)
