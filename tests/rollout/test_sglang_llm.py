"""The SGLang engine over HTTP, with a fake server that can be told to make mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests import served_tokens
from tests.fake_servers import sglang as fake
from tests.served_tokens import ATOL, FAKE, LORA, Served
from unirl.config.errors import (
    IncompatibleError,
    SyncError,
)
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.language import text_params, text_request

serving = partial(served_tokens.serving, SGLangLLMRolloutEngine, **FAKE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it running."""
    with fake() as url, serving(tmp_path_factory.mktemp("run"), url=url) as each:
        yield each


@pytest.mark.parametrize("merge", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["adapters", "merged"])
def test_adapters_keep_the_contract_too(tmp_path, merge) -> None:
    flags = ("--enable-lora", "--max-lora-rank", "4", "--max-loaded-loras", "2")
    with fake(None, *flags) as url, serving(tmp_path, url=url, lora=LORA) as served:
        req = text_request(4, text_params(samples_per_prompt=4))
        check_engine(served.engine, served.trained, served.backend, req, atol=ATOL, merge_adapters=merge)


def test_log_probs_ignore_truncation(served) -> None:
    served.push()
    for params in ({"top_p": 0.3}, {"temperature": 1.3, "top_k": 5}):
        assert served.log_prob_gap(served.asking(**params)) < ATOL


# Mistakes of a server


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


def test_a_transfer_that_another_run_left_open_is_named(tmp_path) -> None:
    with fake() as url, serving(tmp_path, url=url) as first, serving(tmp_path, url=url) as second:
        first.push()
        second.push()
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
    served = Served.at(
        SGLangLLMRolloutEngine, tmp_path, lora=LORA, program="sglang", python_executable=sys.executable, **keys
    )
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


def test_a_tensor_that_the_checkpoint_lacks_is_refused(tmp_path) -> None:
    """The real server would ignore it without a word."""
    served = Served.at(SGLangLLMRolloutEngine, tmp_path, **FAKE)
    layout = WeightSender(served.backend, served.trained.stage).prepare(False)
    tensors = {"model.layers.0.self_attn.qproj.weight": layout.tensors["model.layers.0.self_attn.q_proj.weight"]}
    with pytest.raises(
        SyncError, match=r"would ignore it\. Did you mean 'model\.layers\.0\.self_attn\.q_proj\.weight'"
    ):
        served.engine.server.prepare(replace(layout, tensors=tensors))
