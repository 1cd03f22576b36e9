"""The part of check_engine_package.py for `--engine sglang_llm`: SGLang's server of language models."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from scripts.engine_client import Client, Exchange, Json, answer_of, check_payload, compare, described, read_requests

CLASSES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/load_lora_adapter_from_tensors": "LoadLoRAAdapterFromTensorsReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Path to the class of the package that reads the body. `/flush_cache` has no body."""
PACKAGES = ("sglang", "torch", "transformers")
KINDS = ("full", "merged", "adapters")
LORA = ("--enable-lora", "--max-lora-rank", "4", "--max-loaded-loras", "2")


class LLMClient(Client):
    """A trainer of a tiny language model and SGLang's engine."""

    engine_class: ClassVar[str] = "unirl.rollout.engine.sglang_llm.engine:SGLangLLMRolloutEngine"


# The requests of the engine


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from tests.fake_servers import sglang

    exchanges: list[Exchange] = []
    for kind, words in (("full", ()), ("adapters", LORA)):
        with sglang(None, *words) as url, LLMClient.of("qwen3", kind, url=url) as each:
            each.push()
            for seed in range(2):  # the second adapter takes the place of the first
                each.train(seed)
                each.push()
            each.engine.generate(each.request(temperature=0.7, top_p=0.9, top_k=20))
            each.engine.sleep()
            each.engine.wake_up()
            each.engine.server._abort("r0")
            exchanges += each.exchanges
    return exchanges


def arguments() -> list[str]:
    """The arguments of a server that the engine would start, without the command."""
    with LLMClient.of("qwen3", "adapters", python_executable="python") as each:
        words: list[str] = each.prepared().words("python", 30000)
        return words[3:]


# In the environment of the server, without unirl


def inside(given: Json) -> Json:
    """Read the requests with the classes of sglang. Raises an exception for one that they refuse."""
    from sglang.srt.server_args import ServerArgs

    read = read_requests(given, PACKAGES, read_request)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.parse_args(given["arguments"])
    return read


def read_request(path: str, body: Json) -> None:
    """Raises an exception for a request that sglang refuses, or of which it ignores a field."""
    import dataclasses

    import msgspec
    from pydantic import TypeAdapter
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    if path == "/flush_cache":
        return
    kind = getattr(io_struct, CLASSES[path])
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    unknown = set(body) - {each.name for each in fields}
    assert not unknown, f"{path}: sglang would ignore {sorted(unknown)}"
    parsed = TypeAdapter(kind).validate_python(body)
    if path == "/generate":
        parsed.normalize_batch_and_arguments()
        sampling = SamplingParams(**body["sampling_params"])
        sampling.normalize(None)
        sampling.verify(1000)
    check_payload(path, body)


# A real server


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real server with the tiny model for each kind of weights, and compare it with the trainer."""
    checksums: list[Mapping[str, str]] = []

    def check(each: Client, kind: str) -> Json:
        result = checked(each, checksums if kind == "full" else [])
        if kind == "full":
            result["aborted"] = aborted(each)
            result["in_flight"] = {mode: in_flight(each, mode) for mode in ("drain", "abort", "pause")}
            each.engine.in_flight = "drain"
            each.check_kill(result)
        return result

    runs = ((kind, LLMClient.of("qwen3", kind, python_executable=python, **settings)) for kind in KINDS)
    results, answers = compare(runs, check, shortened)
    shown = {"engine_args": settings.get("engine_args", {})}
    return {"settings": shown, "initial_checksums": checksums, "results": results, "answers": answers}


def checked(each: Client, checksums: list[Mapping[str, str]]) -> Json:
    """Push, sample and compare, before and after updates. `checksums` get those of the first weights."""
    result = each.begin()
    checksums += each.engine.server.checksums()
    gaps = result["largest_logp_differences"]
    gaps["initial weights"] = each.gap()
    gaps["temperature 0.7, top_p 0.9, top_k 20"] = each.gap(temperature=0.7, top_p=0.9, top_k=20)
    gaps["greedy"] = each.gap(temperature=0.0, samples_per_prompt=1)
    each.check_updates(result)
    result["tensors_with_equal_checksums"] = len(each.engine.server.proof.seen)
    return result


def in_flight(each: Client, mode: str) -> Json:
    """Push while three requests run. Returns versions of the rows, and how many last tokens are from the new weights.

    The log-prob of a token from other weights than the trainer's differs from its replay by far more than 1e-4.
    """
    import torch

    each.engine.in_flight = mode
    tracks: list[Any] = []
    req = each.request(max_new_tokens=200, samples_per_prompt=1)
    rollout = threading.Thread(target=lambda: tracks.append(each.engine.generate(req).tracks["text"]))
    rollout.start()
    while rollout.is_alive() and each.engine.gate.num_running < len(req):
        time.sleep(0.01)
    time.sleep(0.5)
    each.train(len(mode))
    each.push()
    rollout.join()
    [track] = tracks
    with torch.no_grad():
        gaps = (track.segment.logp - each.trained.stage.replay(track.conditions, track.segment).logp).abs()
    rows = gaps.split(track.segment.lengths.tolist())
    matching = [int((row.flip(0) < 1e-4).long().cumprod(0).sum()) for row in rows]
    return {"versions": track.weight_version.tolist(), "tokens": [len(row) for row in rows], "of_new_weights": matching}


def aborted(each: Client, attempts: int = 10) -> str:
    """The error of a request that is aborted while it runs. Some end by themselves before."""
    from unirl.config.http import RequestFailed
    from unirl.models.language.pipeline import PlainPrompt
    from unirl.rollout.engine.serving.tokens import TokenRequest
    from unirl.types.sampling import ARSamplingParams

    server = each.engine.server
    prompt = PlainPrompt([1, 2, 3], [1, 2, 3])
    errors: list[str] = []

    def ask() -> None:
        try:
            server.complete(TokenRequest("long", prompt, 1), ARSamplingParams(max_new_tokens=1500, temperature=5.0))
        except RequestFailed as error:
            errors.append(str(error))

    for _ in range(attempts):
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)
        server.post("/abort_request", {"abort_all": True})
        thread.join()
        if errors:
            return errors[0]
    return f"none of {attempts} requests was still running"


def shortened(exchange: Exchange) -> Json:
    """The status and answer of an exchange. Of the settings of the server, those that the engine reads."""
    from unirl.rollout.engine.sglang_llm import messages

    kinds = {"/server_info": messages.ServerInfo, "/model_info": messages.ModelInfo}
    if exchange.path not in kinds:
        return answer_of(exchange)
    fields = kinds[exchange.path].__struct_fields__
    answer = {name: exchange.answer.get(name) for name in fields if name != "model_path"}
    answer |= {"model_path": "base"} if exchange.path == "/model_info" else {}
    return {"status": exchange.status, "body": described(answer)}
