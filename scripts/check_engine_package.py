"""Compares an engine with the real package of its server, and writes the result to benchmarks/engine_packages.json.

    python scripts/check_engine_package.py --engine sglang_llm --python sglang-env/bin/python
    python scripts/check_engine_package.py --engine sglang_llm --python sglang-env/bin/python --serve settings.yaml

The first form takes half a minute, and starts no server. It records the requests of the engine against a fake server,
and the Python of the environment reads each of them with the classes of the package. The second form also starts the
real server with a tiny model, once for each kind of weights that can be sent: it compares log-probs with the trainer's,
before and after updates and after a kill, and keeps the answers. `settings.yaml` has further settings of `rollout`.
`--engine sglang` is the diffusion server (check_diffusion_package.py), and `--engine sglang_llm_images` the server of
language models with tiny models that read images (check_image_package.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

RECORD = Path(__file__).parents[1] / "benchmarks" / "engine_packages.json"
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
PAYLOAD = "serialized_named_tensors"
HASHES = ("expected_checksums", "expected_named_tensors_sha256", "request_id", "inference_time_s")
"""Keys whose values change from run to run."""
PACKAGES = ("sglang", "torch", "transformers")
RANDOM = re.compile(r"-[0-9a-f]{8}\b")
"""The random parts of the names of requests and weights."""
KINDS = ("full", "merged", "adapters")
CHECKS = {
    "openai": "check_openai_package",
    "sglang": "check_diffusion_package",
    "sglang_llm_images": "check_image_package",
    "vllm_omni": "check_omni_package",
}
"""Engine to the script with its checks, if it is not this one."""
PREFIXES = {
    "sd3": "SD3",
    "flux2_klein": "Flux2Klein",
    "hunyuan_video15": "HunyuanVideo15",
    "qwen_image": "QwenImage",
    "qwen_vl": "QwenVL",
}
"""Family to the beginning of the names of its classes, where that is not the capitalised name."""
Json = dict[str, Any]
ClientT = TypeVar("ClientT", bound="Client")


@dataclass
class Exchange:
    """One request with its answer."""

    method: str
    path: str
    body: Any
    status: int
    answer: Any

    @property
    def name(self) -> str:
        """Its kind, such as `POST /generate`. The log-probs of given tokens are in answers of a kind of their own."""
        body = self.body if isinstance(self.body, dict) else {}
        scored = " of given tokens" if "token_ids_logprob" in body else ""
        return f"{self.method} {self.path}{scored}" + (" with images" if "image_data" in body else "")


@dataclass
class Client:
    """A trainer and an engine, whose requests are recorded."""

    trained: Any
    backend: Any
    engine: Any
    sync: Any
    exchanges: list[Exchange] = field(default_factory=list)
    initial_checksums: list[Mapping[str, str]] = field(default_factory=list)

    def push(self) -> float:
        """Send the weights. Returns the seconds that it took."""
        start = time.perf_counter()
        self.sync.push(self.backend.updates)
        self.record()
        return time.perf_counter() - start

    def record(self) -> None:
        """Record the requests from now on, if that has not begun."""
        http = self.engine.server.http
        if "request" in vars(http):
            return
        plain = http.request

        def request(method: str, path: str, *, content: Any = None, **keys: Any) -> Any:
            reply = plain(method, path, content=content, **keys)
            body = json.loads(joined(content)) if content else None
            self.exchanges.append(Exchange(method, path, body, reply.status, answer_in(reply)))
            return reply

        http.request = request

    def train(self, seed: int) -> None:
        """Change all trained weights."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.backend.trainable.values():
                parameter.add_(torch.empty(parameter.shape).normal_(std=0.05, generator=generator))
        self.backend.updates += 1

    def request(self, weights: str = "live", **params: object) -> Any:
        """A request for three prompts with four samples each."""
        from unirl.testing.language import text_params, text_request

        return text_request(3, text_params(**params)).from_weights(weights, self.backend.updates)

    def gap(self, **params: object) -> float:
        """The largest difference between the engine's log-probs and the trainer's replay of the same tokens."""
        import torch

        track = self.engine.generate(self.request(**params)).tracks["text"]
        with torch.no_grad():
            replay = self.trained.stage.replay(track.conditions, track.segment)
        return float((track.segment.logp - replay.logp).abs().max())

    def check_updates(self, result: Json, **params: object) -> None:
        """Update twice, and compare log-probs after each push."""
        for seed in range(2):
            self.train(seed)
            result["push_s"] = round(self.push(), 3)
            result["largest_logp_differences"][f"update {seed + 1}"] = self.gap(**params)
        result["canary_absdiff"] = self.sync.last.canary_absdiff

    def check_kill(self, result: Json) -> None:
        """Kill the server, and compare log-probs after another push."""
        from unirl.config.errors import WeightsLostError

        os.killpg(self.engine.server.process._process.pid, signal.SIGKILL)
        try:
            self.gap()
        except WeightsLostError as error:
            result["after kill -9"] = str(error).partition(":")[0]
        self.push()
        result["largest_logp_differences"]["after kill -9 and another push"] = self.gap()


def joined(content: Any) -> bytes:
    """The body of a request, which may be in parts."""
    return content if isinstance(content, bytes) else b"".join(content or ())


def answer_in(reply: Any) -> Any:
    """The body of a reply. Of tensors in MessagePack, which have their bytes, only dtype and shape are kept."""
    import msgspec

    if reply.content_type == "application/json":
        return json.loads(reply.body)
    try:
        return without_bytes(msgspec.msgpack.decode(reply.body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return reply.body.decode()


def without_bytes(value: Any) -> Any:
    """A decoded answer with `float32 [3, 64, 64]` in place of a tensor."""
    if isinstance(value, list):
        return [without_bytes(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return f"{value['dtype']} {value['shape']}"
    return {key: without_bytes(each) for key, each in value.items()}


@contextmanager
def client_of(
    engine_class: Any,
    client_class: type[ClientT],
    family: str,
    kind: str,
    folder: Path,
    dtype: str = "fp32",
    path: str = "toy",
    **settings: Any,
) -> Iterator[ClientT]:
    """A trainer of a tiny model of `family` and an engine. The server of the engine ends with the block."""
    from unirl.config.device_sets import DeviceSet
    from unirl.distributed.group.handle import Remote
    from unirl.distributed.group.pool import open_pool
    from unirl.distributed.weight_sync.endpoints import WeightSender
    from unirl.distributed.weight_sync.sync import EngineSync
    from unirl.train.backend.base import OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import LoraConfig

    bundle, pipeline = classes_of(family)
    trained = pipeline(bundle(path=path, dtype=dtype))
    lora = None if kind == "full" else LoraConfig(rank=4, alpha=8.0)
    backend = FSDPBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
    engine = engine_class(pipeline(bundle(path=path, dtype=dtype, meta_init=True)), folder, **settings)
    pool = open_pool("local", 2, deadline_s=3600.0)
    roles = {"sender": WeightSender(backend, trained.stage, engine), "rollout": engine}
    sender, rollout = (
        pool.group(DeviceSet("device", (device,))).place(Remote(name, lambda siblings, role=role: role))
        for device, (name, role) in enumerate(roles.items())
    )
    try:
        yield client_class(trained, backend, engine, EngineSync(sender, rollout, merge_adapters=kind == "merged"))
    finally:
        engine.server.stop()


def classes_of(family: str) -> tuple[Any, Any]:
    """The bundle and the pipeline of a family."""
    prefix = PREFIXES.get(family, family.capitalize())
    module = importlib.import_module(f"unirl.models.{family}.family")
    return vars(module)[f"{prefix}Bundle"], vars(module)[f"{prefix}Pipeline"]


@contextmanager
def client(kind: str, folder: Path, **settings: object) -> Iterator[Client]:
    """A trainer of the tiny Qwen3 and its engine. The server of the engine ends with the block."""
    from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine

    with client_of(SGLangLLMRolloutEngine, Client, "qwen3", kind, folder, **settings) as each:
        yield each


# The requests of the engine


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from tests.fake_servers import sglang

    lora = ("--enable-lora", "--max-lora-rank", "4", "--max-loaded-loras", "2")
    exchanges: list[Exchange] = []
    for kind, words in (("full", ()), ("adapters", lora)):
        with (
            sglang(None, *words) as url,
            tempfile.TemporaryDirectory() as folder,
            client(kind, Path(folder), url=url) as each,
        ):
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


def distinct(exchanges: Sequence[Exchange]) -> dict[str, list[Json]]:
    """The bodies of posted requests by path, without random names and with tensors described. Equal ones once."""
    bodies: dict[str, list[Json]] = {}
    for each in exchanges:
        if each.method == "POST":
            known = bodies.setdefault(each.name.removeprefix("POST ").removesuffix(" of given tokens"), [])
            masked = described(each.body)
            if masked not in known and len(known) < 3:
                known.append(masked)
    return bodies


def described(body: Any) -> Any:
    """A body that does not change from run to run: random names are 0, and tensors are described."""
    from unirl.testing.conformance.payloads import tensors_in

    if isinstance(body, str):
        return "an image" if body.startswith("data:image/") else RANDOM.sub("-00000000", body)
    if isinstance(body, list):
        return [described(each) for each in body]
    if not isinstance(body, dict):
        return body
    kept = {key: value for key, value in body.items() if key not in (PAYLOAD, *HASHES)}
    result = {described(key): described(value) for key, value in kept.items()}
    if "expected_named_tensors_sha256" in body:
        result["expected_named_tensors_sha256"] = sorted(body["expected_named_tensors_sha256"])[:3]
    if PAYLOAD in body:
        tensors = tensors_in(body[PAYLOAD][0])
        result[PAYLOAD] = [f"{name} {each.dtype} {list(each.shape)}" for name, each in tensors.items()]
    return result


# In the environment of the server, without unirl


def inside(file: Path) -> Json:
    """Read the requests of `file` with the classes of sglang. Raises an exception for one that they refuse."""
    import dataclasses
    from importlib.metadata import version

    import msgspec
    from pydantic import TypeAdapter
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import MultiprocessingSerializer

    given = json.loads(file.read_text())
    counts: dict[str, int] = {}
    for request in given["requests"]:
        path, body = request["path"], request["body"]
        if path not in CLASSES:
            assert path.startswith("/flush_cache"), f"{path} is unknown"
            continue
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
        if PAYLOAD in body:
            tensors = dict(MultiprocessingSerializer.deserialize(body[PAYLOAD][0]))
            assert all(hasattr(each, "dtype") for each in tensors.values()), f"{path}: a payload without tensors"
        counts[path] = counts.get(path, 0) + 1
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.parse_args(given["arguments"])
    packages = {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
    return {"packages": packages, "requests_read": counts}


# A real server


def live(python: str, settings: Mapping[str, object]) -> Json:
    """Start the real server with the tiny model for each kind of weights, and compare it with the trainer."""
    results: Json = {}
    answers: Json = {}
    checksums: list[Mapping[str, str]] = []
    for kind in KINDS:
        with (
            tempfile.TemporaryDirectory() as folder,
            client(kind, Path(folder), python_executable=python, **settings) as each,
        ):
            results[kind] = checked(each, kind)
            if kind == "full":
                checksums = each.initial_checksums
            print(kind, json.dumps(results[kind]), flush=True)
            for exchange in each.exchanges:
                answers.setdefault(exchange.name, shortened(exchange))
    shown = {"engine_args": settings.get("engine_args", {})}
    return {"settings": shown, "initial_checksums": checksums, "results": results, "answers": answers}


def checked(each: Client, kind: str) -> Json:
    """Push, sample and compare, before and after updates, from a snapshot, and after a kill."""
    result: Json = {"start_and_first_push_s": round(each.push(), 1), "largest_logp_differences": {}}
    each.engine.server.check_ready()  # once more, now that answers are recorded
    each.initial_checksums = each.engine.server._checksums()
    gaps = result["largest_logp_differences"]
    gaps["initial weights"] = each.gap()
    gaps["temperature 0.7, top_p 0.9, top_k 20"] = each.gap(temperature=0.7, top_p=0.9, top_k=20)
    gaps["greedy"] = each.gap(temperature=0.0, samples_per_prompt=1)
    each.check_updates(result)
    result["tensors_with_equal_checksums"] = len(each.engine.server.proof.seen)
    if kind != "full":
        return result
    result["aborted"] = aborted(each)
    result["in_flight"] = {mode: in_flight(each, mode) for mode in ("drain", "abort", "pause")}
    each.engine.in_flight = "drain"
    each.check_kill(result)
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

    answer = exchange.answer
    if exchange.path in ("/server_info", "/model_info"):
        kinds = {"/server_info": messages.ServerInfo, "/model_info": messages.ModelInfo}
        answer = {name: answer.get(name) for name in kinds[exchange.path].__struct_fields__ if name != "model_path"}
        answer |= {"model_path": "base"} if exchange.path == "/model_info" else {}
    return {"status": exchange.status, "body": described(answer)}


def arguments() -> list[str]:
    """The arguments of a server that the engine would start, without the command."""
    with tempfile.TemporaryDirectory() as folder, client("adapters", Path(folder), python_executable="python") as each:
        each.engine.server.prepare(each.sync.train.prepare(False))
        words: list[str] = each.engine.server.words("python", 30000)
        return words[3:]


def checks_of(engine: str) -> Any:
    """The module with the checks of an engine."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if engine == "sglang_llm":
        return sys.modules[__name__]
    return importlib.import_module(f"scripts.{CHECKS[engine]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang_llm", *CHECKS], default="sglang_llm")
    parser.add_argument("--python", help="the Python of the environment with the package")
    parser.add_argument("--serve", type=Path, help="also start the real server, with these settings of `rollout`")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    checks = checks_of(options.engine)
    if options.inside:
        print(json.dumps(checks.inside(options.inside)))
        return
    import yaml

    exchanges = [each for each in checks.requests_of_the_engine() if each.method == "POST"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.json"
        requests = [{"path": each.path, "body": each.body} for each in exchanges]
        file.write_text(json.dumps({"requests": requests, "arguments": checks.arguments()}))
        words = [options.python, __file__, "--engine", options.engine, "--inside", str(file)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        answer = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    if answer.returncode:
        raise SystemExit(f"the package refuses a request:\n{answer.stderr[-3000:]}")
    records = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record = records.get(options.engine, {}) | json.loads(answer.stdout.splitlines()[-1])
    record |= {"date": str(date.today()), "requests": distinct(exchanges)}
    if options.serve:
        record["live"] = {"date": str(date.today())} | checks.live(
            options.python, yaml.safe_load(options.serve.read_text())
        )
    RECORD.write_text(json.dumps(records | {options.engine: record}, indent=1) + "\n")
    print(f"{RECORD}: {record['requests_read']} with {record['packages']}")


if __name__ == "__main__":
    main()
