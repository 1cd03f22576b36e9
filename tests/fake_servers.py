"""Fake servers of rollout engines in threads of the process of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from unirl.rollout.engine.vllm_omni.program.listener import WireServer
from unirl.testing.conformance.openai import fake_openai
from unirl.testing.conformance.served import RECIPES, ServedModel
from unirl.testing.conformance.sglang import fake_sglang_diffusion
from unirl.testing.conformance.sglang_llm import fake_sglang
from unirl.testing.conformance.vllm_omni import fake_vllm_omni
from unirl.types.protocols import DtypeName


@contextmanager
def running(server: WireServer) -> Iterator[str]:
    """A server that answers until the end of the block. Yields its address."""
    # Its end is noticed within this interval, half a second by default.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def sglang(
    fault: str | None = None,
    *flags: str,
    seeds: bool = True,
    dtype: DtypeName = "fp32",
    recipe: str = RECIPES["sglang_llm"],
    path: str = "toy",
) -> Iterator[str]:
    """A fake SGLang server of the tiny model of a recipe. Yields its address."""
    words = [*flags, "--enable-memory-saver", "--enable-weights-cpu-backup"]
    words += ["--enable-deterministic-inference"] if seeds else []
    with running(fake_sglang(ServedModel.of_recipe(recipe, path, dtype), 0, words, fault)) as url:
        yield url


@contextmanager
def openai(fault: str | None = None, *flags: str, logprobs: str = "processed_logprobs") -> Iterator[str]:
    """A fake vLLM server of the tiny Qwen3. Yields its address."""
    words = [*flags, "--logprobs-mode", logprobs]
    with running(fake_openai(ServedModel.of_recipe(RECIPES["openai"]), 0, words, fault)) as url:
        yield url


@contextmanager
def sglang_diffusion(
    fault: str | None = None, path: str = "toy", dtype: DtypeName = "fp32", recipe: str = RECIPES["sglang"]
) -> Iterator[str]:
    """A fake diffusion server of SGLang with the model of a recipe: tiny, or from a folder. Yields its address."""
    with running(fake_sglang_diffusion(ServedModel.of_recipe(recipe, path, dtype), 0, (), fault)) as url:
        yield url


@contextmanager
def vllm_omni(
    fault: str | None = None, path: str = "toy", dtype: DtypeName = "fp32", recipe: str = RECIPES["vllm_omni"]
) -> Iterator[str]:
    """A fake server of vLLM-Omni with the model of a recipe: tiny, or from a folder. Yields its address."""
    with running(fake_vllm_omni(ServedModel.of_recipe(recipe, path, dtype), 0, (), fault)) as url:
        yield url
