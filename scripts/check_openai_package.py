"""The part of check_engine_package.py about OpenAI-compatible servers: requests, a real vLLM, and a real llama.cpp.

    python scripts/check_engine_package.py --engine openai --python vllm-env/bin/python [--serve settings.yaml]

`settings.yaml` has settings of `rollout` for vLLM, such as those of its build for CPUs. Its key `llama_python` is the
Python of an environment for llama_cpp_on_cpu.py, whose server is joined in addition.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from scripts.engine_client import Client, Exchange, Json, compare, described, read_requests

PACKAGES = ("vllm", "torch", "transformers")
ROUTERS = (
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.serve.dev.rpc.api_router",
    "vllm.entrypoints.serve.dev.cache.api_router",
    "vllm.entrypoints.serve.dev.sleep.api_router",
)
"""The modules of the package with the paths other than /v1/completions."""
HEAD_WIDTH = 32
"""The smallest width of an attention head that vLLM computes on a CPU."""


class OpenAIClient(Client):
    """A trainer of a tiny language model and the engine for OpenAI-compatible servers."""

    engine_class: ClassVar[str] = "unirl.rollout.engine.openai.engine:OpenAIRolloutEngine"


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from tests.fake_servers import openai

    with openai() as url, OpenAIClient.of("qwen3", "full", url=url, concurrency=1) as each:
        each.engine.server.frees_memory = True  # as on a GPU
        each.push()
        each.train(0)
        each.push()
        each.gap(temperature=0.7)
        each.engine.sleep()
        each.engine.wake_up()
        return [without_folder(exchange) for exchange in each.exchanges]


def without_folder(exchange: Exchange) -> Exchange:
    """The exchange with the name of a transfer in place of its folder."""
    if exchange.path == "/collective_rpc":
        exchange.body["kwargs"]["weights_path"] = Path(exchange.body["kwargs"]["weights_path"]).name
    return exchange


def arguments() -> list[str]:
    """The arguments of a server that the engine would start, without the command and the model."""
    with OpenAIClient.of("qwen3", "full", python_executable=sys.executable) as each:
        words: list[str] = each.prepared().words("python", 30000)
        return words[5:]


# In the environment of the server, without unirl


def inside(given: Json) -> Json:
    """Read the requests with the classes of vLLM. Raises an exception for one that they refuse."""
    import importlib
    import inspect

    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # the parser of arguments asks for a device
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    endpoints = {
        route.path: route.endpoint for name in ROUTERS for route in importlib.import_module(name).router.routes
    }

    def read(path: str, body: Json) -> None:
        if path == "/v1/completions":
            unknown = set(body) - set(CompletionRequest.model_fields)
            assert not unknown, f"vLLM would ignore {sorted(unknown)}"
            parsed = CompletionRequest.model_validate(body)
            parsed.to_sampling_params(parsed.max_tokens)
        elif path == "/collective_rpc":
            assert body["method"] == reload_weights.__name__
            assert set(body["kwargs"]) <= set(inspect.signature(reload_weights).parameters)
        else:
            assert set(body) <= set(inspect.signature(endpoints[path]).parameters), f"{path}: {body}"

    result = read_requests(given, PACKAGES, read)
    module = importlib.import_module("vllm.entrypoints.common.cli_args")
    module.make_arg_parser(FlexibleArgumentParser()).parse_args(given["arguments"])
    return result


# Real servers


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real vLLM with a tiny model for each kind of weights, and join a real llama.cpp."""
    own = {name: value for name, value in settings.items() if name != "llama_python"}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model)
        keys = {"path": str(model), "python_executable": python, **own}
        runs = ((f"vllm, {kind}", OpenAIClient.of("qwen3", kind, **keys)) for kind in ("full", "merged"))
        results, answers = compare(runs, checked, shortened)
        if "llama_python" in settings:
            joined = compare_with_llama(settings["llama_python"], model)
            results |= joined[0]
            answers |= {f"llama.cpp {name}": answer for name, answer in joined[1].items()}
    shown = {name: value for name, value in own.items() if name != "python_executable"}
    return {"settings": shown, "results": results, "answers": answers}


def write_model(folder: Path) -> None:
    """The tiny Qwen3 as a folder, with wider heads.

    Its output layer is not tied to its embeddings: on a CPU vLLM 0.32 keeps a packed copy of a tied one, which weights
    that are sent later do not reach. The canary stops such a run.
    """
    import torch
    from transformers import AutoConfig, Qwen3ForCausalLM

    from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline

    Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32")).write_model({}, folder)
    config = AutoConfig.from_pretrained(folder)
    config.head_dim, config.tie_word_embeddings = HEAD_WIDTH, False
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def checked(each: Client, name: str) -> Json:
    """Push, sample and compare, before and after updates, and after a kill."""
    result, server = each.begin(), each.engine.server
    result["version"] = server.get("/version", Any)["version"]
    gaps = result["largest_logp_differences"]
    gaps["initial weights"] = each.gap()
    gaps["temperature 0.7"] = each.gap(temperature=0.7)
    gaps["greedy"] = each.gap(temperature=0.0, samples_per_prompt=1)
    each.check_updates(result)
    result["tensors_with_equal_checksums"] = len(server.proof.seen)
    if name.endswith("full"):
        each.check_kill(result)
    return result


def compare_with_llama(python: str, model: Path) -> tuple[Json, Json]:
    """Join a real llama.cpp with the same weights: the result, and its answers."""
    from unirl.rollout.engine.serving.process import free_port

    words = [python, str(Path(__file__).with_name("llama_cpp_on_cpu.py")), str(model), str(free_port())]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        keys: Json = {"url": process.stdout.readline().strip(), "control": "none", "logprobs": "raw"}
        run = OpenAIClient.of("qwen3", "full", path=str(model), **keys)
        return compare([("llama.cpp", run)], checked_llama, shortened)
    finally:
        process.kill()
        process.wait()


def checked_llama(each: Client, name: str) -> Json:
    """Sample and compare."""
    result = each.begin()
    gaps = result["largest_logp_differences"]
    gaps["initial weights"], gaps["greedy"] = each.gap(), each.gap(temperature=0.0, samples_per_prompt=1)
    return result


def shortened(exchange: Exchange) -> Json:
    """The status and answer of an exchange, with one name for all models."""
    body = exchange.answer
    if isinstance(body, dict) and "data" in body:
        kept = ("object", "owned_by", "max_model_len", "meta")
        body = {"data": [{"id": "model"} | {key: card[key] for key in kept if key in card} for card in body["data"]]}
    if isinstance(body, dict) and "model" in body:
        body = {**body, "model": "model"}
    return {"status": exchange.status, "body": described(body)}
