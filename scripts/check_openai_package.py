"""The part of check_engine_package.py about OpenAI-compatible servers: requests, a real vLLM, and a real llama.cpp.

    python scripts/check_engine_package.py --engine openai --python vllm-env/bin/python [--serve settings.yaml]

`settings.yaml` has settings of `rollout` for vLLM, such as those of its build for CPUs. Its key `llama_python` is the
Python of an environment for llama_cpp_on_cpu.py, whose server is joined in addition.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.check_engine_package import Client, Exchange, Json, client_of, described

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


@contextmanager
def openai_client(kind: str, folder: Path, path: str = "toy", **settings: Any) -> Iterator[Client]:
    """A trainer of the tiny Qwen3 and its engine. The server of the engine ends with the block."""
    from unirl.rollout.engine.openai.engine import OpenAIRolloutEngine

    with client_of(OpenAIRolloutEngine, Client, "qwen3", kind, folder, path=path, **settings) as each:
        yield each


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from unirl.testing.conformance.openai import fake_openai
    from unirl.testing.conformance.served import RECIPES, ServedModel

    fake = fake_openai(ServedModel.of_recipe(RECIPES["openai"]), 0, ["--logprobs-mode", "processed_logprobs"], None)
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            openai_client("full", Path(folder), url=fake.url, concurrency=1) as each,
        ):
            each.engine.server.frees_memory = True  # as on a GPU
            each.push()
            each.train(0)
            each.push()
            each.gap(temperature=0.7)
            each.engine.sleep()
            each.engine.wake_up()
            return [without_folder(exchange) for exchange in each.exchanges]
    finally:
        fake.shutdown()
        fake.server_close()
        thread.join()


def without_folder(exchange: Exchange) -> Exchange:
    """The exchange with the name of a transfer in place of its folder."""
    if exchange.path == "/collective_rpc":
        exchange.body["kwargs"]["weights_path"] = Path(exchange.body["kwargs"]["weights_path"]).name
    return exchange


def arguments() -> list[str]:
    """The arguments of a server that the engine would start, without the command and the model."""
    with (
        tempfile.TemporaryDirectory() as folder,
        openai_client("full", Path(folder), python_executable=sys.executable) as each,
    ):
        each.engine.server.prepare(each.sync.train.prepare(False))
        words: list[str] = each.engine.server.words("python", 30000)
        return words[5:]


# In the environment of the server, without unirl


def inside(file: Path) -> Json:
    """Read the requests of `file` with the classes of vLLM. Raises an exception for one that they refuse."""
    import importlib
    import inspect
    from importlib.metadata import version

    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # the parser of arguments asks for a device
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    endpoints = {
        route.path: route.endpoint for name in ROUTERS for route in importlib.import_module(name).router.routes
    }
    given = json.loads(file.read_text())
    counts: dict[str, int] = {}
    for request in given["requests"]:
        path, body = request["path"].partition("?")[0], request["body"]
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
        counts[path] = counts.get(path, 0) + 1
    module = importlib.import_module("vllm.entrypoints.common.cli_args")
    module.make_arg_parser(FlexibleArgumentParser()).parse_args(given["arguments"])
    packages = {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
    return {"packages": packages, "requests_read": counts}


# Real servers


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real vLLM with a tiny model for each kind of weights, and join a real llama.cpp."""
    own = {name: value for name, value in settings.items() if name != "llama_python"}
    results: Json = {}
    answers: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model)
        for kind in ("full", "merged"):
            run = Path(folder) / kind
            with openai_client(kind, run, str(model), python_executable=python, **own) as each:
                results[f"vllm, {kind}"] = checked(each, kill=kind == "full")
                print(kind, json.dumps(results[f"vllm, {kind}"]), flush=True)
                keep_answers(each, answers)
        if "llama_python" in settings:
            results["llama.cpp"] = checked_llama(settings["llama_python"], model, answers)
            print("llama.cpp", json.dumps(results["llama.cpp"]), flush=True)
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


def checked(each: Client, kill: bool) -> Json:
    """Push, sample and compare, before and after updates, and after a kill."""
    result: Json = {"start_and_first_push_s": round(each.push(), 1), "largest_logp_differences": {}}
    server = each.engine.server
    result["version"] = json.loads(server.http.request("GET", "/version").body)["version"]
    server.check_ready()  # once more, now that answers are recorded
    gaps = result["largest_logp_differences"]
    gaps["initial weights"] = each.gap()
    gaps["temperature 0.7"] = each.gap(temperature=0.7)
    gaps["greedy"] = each.gap(temperature=0.0, samples_per_prompt=1)
    each.check_updates(result)
    result["tensors_with_equal_checksums"] = len(server.proof.seen)
    if kill:
        each.check_kill(result)
    return result


def checked_llama(python: str, model: Path, answers: Json) -> Json:
    """Join a real llama.cpp with the same weights: sample and compare, with the same seeds twice."""
    from unirl.rollout.engine.serving.process import free_port

    port = free_port()
    words = [python, str(Path(__file__).with_name("llama_cpp_on_cpu.py")), str(model), str(port)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        keys: Json = {"url": url, "control": "none", "logprobs": "raw"}
        with (
            tempfile.TemporaryDirectory() as folder,
            openai_client("full", Path(folder), str(model), **keys) as each,
        ):
            result: Json = {"first_push_s": round(each.push(), 1)}
            each.engine.server.check_ready()
            gaps = {"initial weights": each.gap(), "greedy": each.gap(temperature=0.0, samples_per_prompt=1)}
            keep_answers(each, answers, "llama.cpp ")
            return result | {"largest_logp_differences": gaps}
    finally:
        process.kill()
        process.wait()


def keep_answers(each: Client, answers: Json, prefix: str = "") -> None:
    """Keep the first answer of each kind."""
    for exchange in each.exchanges:
        body = exchange.answer
        if isinstance(body, dict) and "data" in body:
            kept = ("object", "owned_by", "max_model_len", "meta")
            body = {
                "data": [{"id": "model"} | {key: card[key] for key in kept if key in card} for card in body["data"]]
            }
        if isinstance(body, dict) and "model" in body:
            body = {**body, "model": "model"}
        answers.setdefault(prefix + exchange.name, {"status": exchange.status, "body": described(body)})
