"""A trainer and an engine whose requests are recorded: what the checks of engines against real packages share.

Client.of -> push, train, gap -> exchanges -> described, read_requests, compare
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

PAYLOAD = "serialized_named_tensors"
HASHES = ("expected_checksums", "expected_named_tensors_sha256", "request_id", "inference_time_s")
"""Keys whose values change from run to run."""
RANDOM = re.compile(r"-[0-9a-f]{8}\b")
"""The random parts of the names of requests and weights."""
PREFIXES = {
    "sd3": "SD3",
    "flux2_klein": "Flux2Klein",
    "hunyuan_video15": "HunyuanVideo15",
    "qwen_image": "QwenImage",
    "qwen_vl": "QwenVL",
}
"""Family to the beginning of the names of its classes, where that is not the capitalised name."""
Json = dict[str, Any]


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

    engine_class: ClassVar[str]
    """The module of the engine and its class, separated by a colon."""

    folder: Path
    """A folder for files of a check, which is removed at the end."""
    trained: Any
    backend: Any
    engine: Any
    sync: Any
    exchanges: list[Exchange] = field(default_factory=list)

    @classmethod
    @contextmanager
    def of(cls, family: str, kind: str, dtype: str = "fp32", path: str = "toy", **settings: Any) -> Iterator[Self]:
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
        module, _, name = cls.engine_class.partition(":")
        engine_class = vars(importlib.import_module(module))[name]
        trained = pipeline(bundle(path=path, dtype=dtype))
        lora = None if kind == "full" else LoraConfig(rank=4, alpha=8.0)
        backend = FSDPBackend(trained.bundle, 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
        pool = open_pool("local", 2, deadline_s=3600.0)
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_class(pipeline(bundle(path=path, dtype=dtype, meta_init=True)), Path(folder), **settings)
            roles = {"sender": WeightSender(backend, trained.stage, engine), "rollout": engine}
            sender, rollout = (
                pool.group(DeviceSet("device", (device,))).place(Remote(name, lambda siblings, role=role: role))
                for device, (name, role) in enumerate(roles.items())
            )
            try:
                sync = EngineSync(sender, rollout, merge_adapters=kind == "merged")
                yield cls(Path(folder), trained, backend, engine, sync)
            finally:
                engine.server.stop()

    def prepared(self) -> Any:
        """The server, which knows what will be sent to it and has not been started."""
        self.engine.server.prepare(self.sync.train.prepare(False))
        return self.engine.server

    def begin(self) -> Json:
        """Start the server and send the first weights. Returns a result without differences of log-probs."""
        result: Json = {"start_and_first_push_s": round(self.push(), 1), "largest_logp_differences": {}}
        self.engine.server.check_ready()  # once more, now that answers are recorded
        return result

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
            body = self.readable(joined(content)) if content else None
            self.exchanges.append(Exchange(method, path, body, reply.status, answer_in(reply)))
            return reply

        http.request = request

    def readable(self, content: bytes) -> Json:
        """A body of a request as JSON."""
        body: Json = json.loads(content)
        return body

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
    """The body of a reply. Of tensors in MessagePack only dtype and shape are kept; other bytes are left out."""
    import msgspec

    if reply.content_type == "application/json":
        return json.loads(reply.body)
    try:
        return without_bytes(msgspec.msgpack.decode(reply.body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None if reply.content_type == "application/octet-stream" else reply.body.decode()


def without_bytes(value: Any) -> Any:
    """A decoded answer with `float32 [3, 64, 64]` in place of a tensor."""
    if isinstance(value, list):
        return [without_bytes(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return f"{value['dtype']} {value['shape']}"
    return {key: without_bytes(each) for key, each in value.items()}


def classes_of(family: str) -> tuple[Any, Any]:
    """The bundle and the pipeline of a family."""
    prefix = PREFIXES.get(family, family.capitalize())
    module = importlib.import_module(f"unirl.models.{family}.family")
    return vars(module)[f"{prefix}Bundle"], vars(module)[f"{prefix}Pipeline"]


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


def read_requests(given: Json, packages: Iterable[str], read: Callable[[str, Json], None]) -> Json:
    """The versions of packages, and the number of requests by path, all of which `read` has read.

    Args:
        given: `requests` of an engine, each with `path` and `body`.
    """
    from importlib.metadata import version

    counts: dict[str, int] = {}
    for request in given["requests"]:
        path = request["path"].partition("?")[0]
        read(path, request["body"])
        counts[path] = counts.get(path, 0) + 1
    versions = {name: version(name) for name in packages} | {"python": sys.version.split()[0]}
    return {"packages": versions, "requests_read": counts}


def check_payload(path: str, body: Json) -> None:
    """Raises AssertionError for tensors that SGLang cannot read. It runs in the environment of SGLang."""
    from sglang.srt.utils import MultiprocessingSerializer

    if PAYLOAD in body:
        tensors = dict(MultiprocessingSerializer.deserialize(body[PAYLOAD][0]))
        assert all(hasattr(each, "dtype") for each in tensors.values()), f"{path}: a payload without tensors"


def compare(
    runs: Iterable[tuple[str, AbstractContextManager[Client]]],
    check: Callable[[Any, str], Json],
    kept: Callable[[Exchange], Json],
) -> tuple[Json, Json]:
    """The result of `check` for each run of a real server by name, and the first answer of each kind, as `kept`."""
    results: Json = {}
    answers: Json = {}
    for name, run in runs:
        with run as each:
            results[name] = check(each, name)
            print(name, json.dumps(results[name]), flush=True)
            for exchange in each.exchanges:
                if exchange.name not in answers:
                    answers[exchange.name] = kept(exchange)
    return results, answers


def answer_of(exchange: Exchange) -> Json:
    """The status and the answer of an exchange."""
    return {"status": exchange.status, "body": described(exchange.answer)}
