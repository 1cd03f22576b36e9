"""The contract of all engines with a server of latents, over HTTP, with fake servers that are told to make mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import fake_servers
from tests.processes import process_of
from tests.served_latents import Served, asking, serving
from unirl.config.errors import EngineError, IncompatibleError, SamplingMismatchError, SyncError, WeightsLostError
from unirl.rollout.engine.serving import server
from unirl.rollout.engine.serving.latents import LatentServingEngine
from unirl.rollout.engine.sglang.engine import SGLangRolloutEngine
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniRolloutEngine
from unirl.sde.kernels import CPSSDEStrategy, DPMSolver2M
from unirl.testing.engine import check_engine
from unirl.train.configs import LoraConfig

LORA = LoraConfig(rank=4, alpha=8.0)


@dataclass(frozen=True)
class Kind:
    """One engine."""

    name: str
    """The name of its fake server."""
    engine: type[LatentServingEngine]
    fake: Callable[..., AbstractContextManager[str]]
    brings_weights: str
    """The path of the requests that bring weights."""
    atol: float
    """Largest difference of log-probs."""
    stale: str
    """The error about stale weights."""
    lies: Mapping[str, tuple[type[Exception], str]]
    """Fault of the server to the error, where engines do not share it."""

    def serving(self, folder: Path, **keys: object) -> AbstractContextManager[Served]:
        return serving(self.engine, folder, **keys)


SGLANG = Kind(
    "sglang",
    SGLangRolloutEngine,
    fake_servers.sglang_diffusion,
    "/update_weights_from_tensor",
    1e-4,  # the replay computes the noise of fp32 latents, the server has it
    "new weights were sent, and SGLang reports the checksum of the old ones",
    {
        "other-model": (SyncError, "the server took every tensor, but the forward of engine rank 0 differs"),
        "wrong-dtype": (SyncError, r"update weight check failed: checksum mismatch for \d+ tensor"),
        "fewer-rows": (EngineError, "with 0 samples, and one was asked for"),
        "other-sigmas": (
            SamplingMismatchError,
            r"noise levels \(sigmas\) used are \[1, .*, and the request has \[1, ",
        ),
        "other-steps": (SamplingMismatchError, r"stochastic steps used are \[1\], and the request has \[0, 1\]"),
        "version-skew": (SyncError, "from the weights 'those with the checksum"),
    },
)
OMNI = Kind(
    "vllm_omni",
    VLLMOmniRolloutEngine,
    fake_servers.vllm_omni,
    "/weights/bucket",
    2e-6,  # the server computes them from the stored latents, as the trainer does
    "did not arrive as it was sent",
    {
        "other-model": (SyncError, "every tensor arrived, but the forward of engine rank 0 differs"),
        "wrong-dtype": (SyncError, "did not arrive as it was sent"),
        "fewer-rows": (EngineError, r"its answer to canary:\d has no latents"),
        "other-sigmas": (
            SamplingMismatchError,
            r"noise levels \(sigmas\) used are \[1, 0\.7.*, and the request has \[",
        ),
        "other-steps": (EngineError, "2 stochastic steps need as many finite log-probs"),
        "version-skew": (SyncError, "from the weights 'of-another-run'"),
    },
)
LIES: Mapping[str, tuple[type[Exception], str]] = {
    "ignore-seeds": (EngineError, "does not start from the noise of its seed"),
    "nan": (EngineError, "the latents have values that are not finite"),
    "slow": (EngineError, r"gave no answer for canary:\d in 5 attempts"),
    "other-noise-scale": (SamplingMismatchError, r"samples with another noise scale \(sampling\.kernel\.eta\)"),
    "swap-rows": (EngineError, "does not start from the noise of its seed"),
}
"""Fault of a server to the error of every engine."""


@pytest.fixture(scope="module", params=[SGLANG, OMNI], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    each = request.param
    assert isinstance(each, Kind)
    return each


@pytest.fixture(scope="module")
def served(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it running."""
    with kind.fake() as url, kind.serving(tmp_path_factory.mktemp("run"), url=url) as each:
        yield each


def test_it_keeps_the_contract_of_an_engine(kind, served) -> None:
    """Refusal before a push, log-probs equal to the replay's before and after an update, row bits, sleep, snapshots."""
    check_engine(served.engine, served.trained, served.backend, asking(served.engine), atol=kind.atol)


@pytest.mark.parametrize("merge", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["adapters", "merged"])
def test_adapters_keep_the_contract_too(kind, tmp_path, merge) -> None:
    with kind.fake() as url, kind.serving(tmp_path, url=url, lora=LORA) as served:
        req = asking(served.engine)
        check_engine(served.engine, served.trained, served.backend, req, atol=kind.atol, merge_adapters=merge)


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": CPSSDEStrategy(eta=0.5)},
        {"guidance_scale": 4.0, "negative_prompt": "blurred"},
        {"sde_indices": (1,), "height": 64},
        {"num_inference_steps": 6, "sde_indices": (0, 2, 4)},
    ],
    ids=["cps", "guidance", "one step", "six steps"],
)
def test_sampling_settings_reach_the_server(kind, served, changes) -> None:
    """The replay uses the settings of the request, so that equal log-probs say that the server used them."""
    served.push()
    assert served.log_prob_gap(served.asking(**changes)) < kind.atol


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init_same_noise": True}, r"Set sampling\.init_same_noise=false"),
        ({"solver": DPMSolver2M()}, r"sampling\.solver: .* takes Euler steps"),
        ({"cache_threshold": 0.1}, r"sampling\.cache_threshold"),
        ({"kernel": CPSSDEStrategy(log_prob_form="unnormalised")}, "Set log_prob_form=gaussian"),
    ],
)
def test_settings_that_the_server_does_not_have_are_refused(served, changes, says) -> None:
    served.push()
    with pytest.raises(IncompatibleError, match=says):
        served.sampled(served.asking(**changes))


@pytest.mark.parametrize("transport", ["http", "ipc"])
def test_weights_arrive_by_each_transport(kind, tmp_path, transport) -> None:
    """On a CPU: a request, and memory that both share. What arrived is read back from the server's network."""
    with kind.fake() as url, kind.serving(tmp_path, url=url, transport=transport) as served:
        served.push()
        for seed in range(2):
            served.train(seed)
            served.push()
        assert served.log_prob_gap(served.asking()) < kind.atol


# Mistakes of a server


@pytest.mark.parametrize(
    "fault", ["other-model", "wrong-dtype", "ignore-seeds", "nan", "fewer-rows", "slow", "other-sigmas"]
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


@pytest.mark.parametrize("fault", ["other-steps", "other-noise-scale", "swap-rows", "version-skew"])
def test_a_lie_is_caught_in_the_first_samples(kind, tmp_path, fault) -> None:
    error, says = {**LIES, **kind.lies}[fault]
    with kind.fake(fault) as url, kind.serving(tmp_path, url=url) as served:
        served.push()
        with pytest.raises(error, match=says):
            served.sampled(served.asking())


def test_a_server_that_ignores_guidance_is_caught(kind, tmp_path) -> None:
    """It may repeat the scale of the request, so that only the velocity tells."""
    with kind.fake("other-guidance") as url, kind.serving(tmp_path, url=url) as served:
        served.push()
        with pytest.raises(SamplingMismatchError, match=r"does not use sampling\.guidance_scale=4 as the trainer"):
            served.sampled(served.asking(guidance_scale=4.0))


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


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_stale_weights_are_caught(kind, tmp_path, lora) -> None:
    with kind.fake("stale-weights") as url, kind.serving(tmp_path, url=url, lora=lora) as served:
        served.push()
        served.train()
        with pytest.raises(SyncError, match=kind.stale):
            served.push()


def test_samples_that_are_broken_off_are_asked_for_again(kind, tmp_path) -> None:
    """With the same seeds, so that the answers are those of a server without faults."""
    latents = []
    for fault in (None, "half-answer", "close"):
        with kind.fake(fault) as url, kind.serving(tmp_path, url=url) as served:
            served.push()
            latents.append(served.sampled(served.asking()).latents)
    assert torch.equal(latents[1], latents[0]) and torch.equal(latents[2], latents[0])


@pytest.mark.slow
def test_a_server_that_is_gone_is_named(kind, tmp_path) -> None:
    """The command starts a server in a process of its own, which kills itself while it samples."""
    words = [sys.executable, "-m", "unirl.cli", "engines", "fake", "--engine", kind.name, "--fault", "die"]
    with process_of(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with kind.serving(tmp_path, url=url) as served:
            served.push()
            with pytest.raises(EngineError, match=f"no {served.engine.server.name} answers at rollout.url={url}"):
                served.sampled(served.asking())
        assert process.wait(60) == -signal.SIGKILL


KILLED = [(kind, {"transport": transport}) for kind in (SGLANG, OMNI) for transport in ("http", "ipc")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "keys"), KILLED, ids=["sglang http", "sglang ipc", "vllm_omni http", "vllm_omni ipc"])
def test_a_killed_server_gets_its_weights_again_and_gives_the_same_samples(kind, keys, tmp_path) -> None:
    """kill -9 within a rollout: the engine asks for the weights, and the rollout is repeated with the same seeds."""
    with kind.serving(tmp_path, max_restarts=1, **keys) as served:
        served.train()
        served.push()
        expected, process = served.sampled(served.asking()).latents, served.engine.server.process
        assert process is not None
        sample, asked = served.engine.server.sample, []

        def killing(*args):
            asked.append(args)
            if len(asked) == 3:
                os.killpg(process._process.pid, signal.SIGKILL)
            return sample(*args)

        served.engine.server.sample = killing
        with pytest.raises(WeightsLostError, match="those of the last transfer must be sent again"):
            served.sampled(served.asking())
        with pytest.raises(SyncError, match="no verified weights"):
            served.sampled(served.asking())
        served.push()
        assert torch.equal(served.sampled(served.asking()).latents, expected) and process.num_starts == 2
