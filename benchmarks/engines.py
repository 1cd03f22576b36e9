"""Compares engines that sample with a server with the same work in one process, and weight sync with a socket.

    OMP_NUM_THREADS=1 python benchmarks/engines.py [--pairs 10] [--cases "sglang 26m"] [--json out.json]

The servers are the fake ones of UniRL (`unirl engines fake`), in processes of their own, over HTTP on the loopback
interface.

Rollout: `generate` of an engine is compared with what stands behind its server, called in this process for the same
samples one after the other, and with the prompts' conditions and the images that every rollout returns. Both give the
same latents, which is checked. `all` returns the latents of all steps, `final` those of an evaluation.

Weights: `begin_weights`, `send_weights` and `end_weights` of an engine's server are compared with a plain copy of the
same bytes to another process through a socket of the loopback interface.

The file of --json keeps the results of cases that are not chosen, so that they can be measured one after another.

Each case is measured by two clocks. `wall` is the time that passes: the engine checks answers while its server samples
the next one. `cpu` is the time of all cores in both processes, which other programs on the machine disturb less.

The breakdown of a case has the CPU seconds of each part. It comes from a server in a thread of this process, whose
functions are timed. `rest` is HTTP, JSON and threads, for weights also the copies between sockets and memory.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.harness import Clock, Ratio, machine, measuring, paired_by, show
from tests import fake_servers
from tests.served_latents import Served
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.rollout.engine.serving.engine import seeds_of
from unirl.rollout.engine.serving.latent_server import LatentRequest
from unirl.rollout.engine.serving.latents import LatentServingEngine
from unirl.rollout.engine.serving.process import LOOPBACK
from unirl.rollout.engine.sglang import messages as sglang_messages
from unirl.rollout.engine.sglang.engine import SGLangRolloutEngine
from unirl.rollout.engine.sglang.server import SGLangDiffusionServer
from unirl.rollout.engine.vllm_omni import messages as omni_messages
from unirl.rollout.engine.vllm_omni import transports
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniRolloutEngine
from unirl.rollout.engine.vllm_omni.program.weights import BucketReader
from unirl.rollout.engine.vllm_omni.server import VLLMOmniServer
from unirl.testing.conformance import sglang as fake_sglang
from unirl.testing.conformance import vllm_omni as fake_omni
from unirl.testing.conformance.latent_model import LatentModel
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import stored_positions

STEPS, IMAGE_SIDE = 5, 128
SAMPLES_PER_PROMPT = 1  # of three prompts
SIZES = {"toy": None, "26m": {"num_layers": 3, "num_attention_heads": 8, "attention_head_dim": 64}}
MODEL_ID = "stable-diffusion-3.5-medium"
LATENTS = {"all": {"sde_indices": tuple(range(STEPS - 1))}, "final": {"sde_indices": ()}}
Parts = Mapping[str, tuple[Any, str]]
"""Name of a part to the function that does it: its owner, and its name there."""


@dataclass(frozen=True)
class Case:
    """One engine."""

    name: str
    engine: type[LatentServingEngine]
    serve: Callable[..., Any]
    """The fake server in a thread."""
    keys: Mapping[str, object]
    rollout: Parts
    """Empty: its rollouts are those of another case."""
    weights: Parts


COMMON: Parts = {
    "conditions of the prompts": (SD3Pipeline, "conditions_of"),
    "decoding of the images": (SD3Pipeline, "decode"),
    "check of noise and log-probs": (LatentServingEngine, "_check_latents"),
    "comparison of settings": (sys.modules[LatentServingEngine.__module__], "verify_used"),
}
SGLANG_ROLLOUT: Parts = {
    "sampling": (LatentModel, "sample"),
    "answer encoded": (fake_sglang.FakeSGLangDiffusion, "_row"),
    "answer decoded": (SGLangDiffusionServer, "_read_samples"),
    "tensors of the answer": (sglang_messages.WireTensor, "tensor"),
    "checksum of the weights": (LatentModel, "checksum"),
    **COMMON,
}
SGLANG_WEIGHTS: Parts = {
    "hashes of what is sent": (sglang_messages, "tensor_hash"),
    "copy, pickle and base64": (sglang_messages, "weights_from_tensors"),
    "JSON, written": (sys.modules["unirl.rollout.engine.serving.http_server"].msgspec.json, "encode"),
    "base64 and pickle, read": (fake_sglang, "tensors_in"),
    "stored in the network": (LatentModel, "store"),
    "hashes of what is held": (LatentModel, "unequal"),
    "checksum of the weights": (LatentModel, "checksum"),
}
OMNI_ROLLOUT: Parts = {
    "sampling": (fake_omni.FakeOmni, "_sampled"),
    "answer decoded": (VLLMOmniServer, "_read_sample"),
    "requests written": (omni_messages, "order"),
    **COMMON,
}
OMNI_WEIGHTS: Parts = {
    "packed": (transports, "pack"),
    "bytes read as tensors": (BucketReader, "tensors"),
    "copied in the server": (fake_omni.FakeOmni, "bucket"),
    "stored in the network": (LatentModel, "store"),
    "fingerprints of what is held": (fake_omni.FakeOmni, "held"),
}
SGLANG = (SGLangRolloutEngine, fake_servers.sglang_diffusion)
OMNI = (VLLMOmniRolloutEngine, fake_servers.vllm_omni)
CASES = (
    Case(
        "sglang",
        SGLangRolloutEngine,
        fake_servers.sglang_diffusion,
        {"model_id": MODEL_ID},
        SGLANG_ROLLOUT,
        SGLANG_WEIGHTS,
    ),
    Case(
        "sglang ipc",
        SGLangRolloutEngine,
        fake_servers.sglang_diffusion,
        {"model_id": MODEL_ID, "transport": "ipc"},
        {},
        SGLANG_WEIGHTS,
    ),
    Case("vllm_omni", *OMNI, {"transport": "http"}, OMNI_ROLLOUT, OMNI_WEIGHTS),
    Case("vllm_omni ipc", *OMNI, {"transport": "ipc"}, {}, OMNI_WEIGHTS),
)


# The models and the engines


def write_model(folder: Path, changes: Mapping[str, object] | None) -> Path:
    """Writes the tiny SD3, with another transformer if `changes` of its settings are given. Returns its folder."""
    from diffusers import SD3Transformer2DModel

    SD3Pipeline(SD3Bundle(path="toy", dtype="fp32")).write_model({}, folder)
    if changes is not None:
        settings = json.loads((folder / "transformer" / "config.json").read_text())
        width = {"caption_projection_dim": changes["num_attention_heads"] * changes["attention_head_dim"]}
        torch.manual_seed(0)
        network = SD3Transformer2DModel.from_config({**settings, **changes, **width})
        network.save_pretrained(folder / "transformer")
    return folder


@contextmanager
def served(case: Case, model: Path, run: Path, **keys: object) -> Iterator[Served]:
    """A trainer and an engine with the same weights, whose server ends with the block."""

    def bundle(**settings: Any) -> SD3Bundle:
        return SD3Bundle(**{**settings, "path": str(model)})

    each = Served.at(case.engine, run, family=(bundle, SD3Pipeline), **case.keys, **keys)
    try:
        each.push()
        yield each
    finally:
        each.engine.server.stop()


def clock_of(pid: int) -> Clock:
    """The CPU seconds of another process of Linux, all threads."""
    return partial(time.clock_gettime, (~pid << 3) | 2)


def clocks_with(*pids: int) -> dict[str, Clock]:
    """The time that passes, and the CPU seconds of this process and others."""
    others = [clock_of(pid) for pid in pids]
    return {"wall": time.perf_counter, "cpu": lambda: time.process_time() + sum(clock() for clock in others)}


def compared(
    case: str, shapes: Mapping[str, Any], ours: Callable[[], object], bare: Callable[[], object], pairs: int, pids: Any
) -> list[Ratio]:
    """Returns the ratio by each clock."""
    clocks = clocks_with(*pids)
    results = paired_by(list(clocks.values()), case, dict(shapes), ours, bare, pairs)
    for clock, result in zip(clocks, results, strict=True):
        result.shapes = {**shapes, "clock": clock}
        show(result)
    return results


# Breakdown


class Spent(threading.local):
    """The CPU seconds of the timed functions that the present one called, in each thread."""

    inner = 0.0


class Timers:
    """CPU seconds of functions, without those of other timed functions that they call."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.spent = Spent()

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `work`, timed."""

        @wraps(work)
        def timing(*args: Any, **keys: Any) -> Any:
            outer, self.spent.inner = self.spent.inner, 0.0
            start = time.thread_time()
            try:
                return work(*args, **keys)
            finally:
                spent = time.thread_time() - start
                self.seconds[part] += spent - self.spent.inner
                self.calls[part] += 1
                self.spent.inner = outer + spent

        return timing


def breakdown(parts: Parts, work: Callable[[], object], repeats: int = 1) -> dict[str, dict[str, float]]:
    """Returns the CPU seconds of one run by part, their share of all, and the number of calls."""
    work()
    timers = Timers()
    with ExitStack() as stack:
        for part, (owner, name) in parts.items():
            stack.enter_context(mock.patch.object(owner, name, timers.timed(part, getattr(owner, name))))
        start = time.process_time()
        for _ in range(repeats):
            work()
        total = time.process_time() - start
    timers.seconds["rest"] = total - sum(timers.seconds.values())
    return {
        part: {
            "cpu_s": round(timers.seconds[part] / repeats, 5),
            "share": round(timers.seconds[part] / total, 4),
            "calls": timers.calls[part] // repeats,
        }
        for part in (*parts, "rest")
    }


# Rollouts


def parameters_m(each: Served) -> float:
    """The parameters of the trained network, in millions."""
    return round(sum(p.numel() for p in each.trained.bundle.trainable().parameters()) / 1e6, 2)


def direct(each: Served, model: LatentModel, req: RolloutReq) -> Callable[[], Tensor]:
    """Returns a function that samples the rows of `req` by what stands behind the server, and returns their latents.

    It makes the conditions and the images, too, which are parts of every rollout.
    """
    _, params = req.only_track(DiffusionSamplingParams)
    pipeline, server = each.engine.pipeline, each.engine.server
    stored = stored_positions(params.sde_indices or (), params.num_inference_steps)
    rows = list(zip(req.sample_ids, req.prompts(), seeds_of(req, params, "x"), strict=True))
    backend = fake_omni.FakeOmni(model, "", None)

    def by_omni(id: str, prompt: str, seed: int) -> Tensor:
        return backend.sample(server.order(LatentRequest(id, prompt, seed), params, stored))[0]["latents"]

    def by_sglang(id: str, prompt: str, seed: int) -> Tensor:
        return model.sample(prompt, params, seed).latents[list(stored)]

    sample = by_omni if isinstance(server, VLLMOmniServer) else by_sglang

    def work() -> Tensor:
        pipeline.conditions_of(req, params)
        latents = torch.stack([sample(*row) for row in rows]).to(torch.float32)
        pipeline.decode(latents[:, -1])
        return latents

    return work


def rollout(name: str, latents: str, each: Served, model: LatentModel, pairs: int) -> list[Ratio]:
    """Measures a rollout."""
    req = request_of(each, latents)
    bare = direct(each, model, req)
    segment = each.sampled(req)
    with torch.no_grad():
        assert torch.allclose(segment.latents.float(), bare(), atol=1e-2), "other samples than those of the server"
    shapes = {
        "parameters_m": parameters_m(each),
        "rows": len(req),
        "steps": STEPS,
        "latents": latents,
        "latent_bytes": segment.latents.nbytes,
        "image_tokens": (IMAGE_SIDE // 16) ** 2,
    }
    with torch.no_grad():
        return compared(name, shapes, lambda: each.engine.generate(req), bare, pairs, [pid_of(each)])


def request_of(each: Served, latents: str) -> RolloutReq:
    """A request whose answers have the latents of all steps, or the final ones."""
    settings = {"num_inference_steps": STEPS, "height": IMAGE_SIDE, "width": IMAGE_SIDE}
    return each.asking(**settings, samples_per_prompt=SAMPLES_PER_PROMPT, **LATENTS[latents])


def pid_of(each: Served) -> int:
    """The process of the server."""
    pid: int = each.engine.server.process._process.pid
    return pid


# Weights


def receive(port: int, size: int) -> None:
    """The other end of the socket: reads `size` bytes into the same memory again and again, and confirms each time."""
    data = memoryview(bytearray(size))
    with socket.create_connection((LOOPBACK, port)) as connection:
        while True:
            done = 0
            while done < size:
                count = connection.recv_into(data[done:])
                if count == 0:
                    return
                done += count
            connection.sendall(b"1")


@contextmanager
def socket_copy(data: Tensor) -> Iterator[tuple[Callable[[], object], int]]:
    """A function that copies `data` to another process, and the process."""
    content = memoryview(data.numpy())
    with socket.create_server((LOOPBACK, 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(
            target=receive, args=(listener.getsockname()[1], len(content)), daemon=True
        )
        process.start()
        connection, _ = listener.accept()

        def copy() -> None:
            connection.sendall(content)
            assert connection.recv(1) == b"1"

        with connection:
            assert process.pid is not None
            yield copy, process.pid
        process.join()


def transfer(each: Served) -> Callable[[], object]:
    """Returns a function that sends all weights to the server."""
    tensors = {name: tensor.detach() for name, tensor in each.backend.named_tensors("full")}
    server, name = each.engine.server, each.engine.weights_name

    def work() -> None:
        server.begin_weights(name)
        server.send_weights(tensors)
        server.end_weights()

    return work


def weights(name: str, each: Served, pairs: int) -> list[Ratio]:
    """Measures a transfer of all weights."""
    tensors = [tensor.detach().reshape(-1) for _, tensor in each.backend.named_tensors("full")]
    data = torch.cat(tensors).view(torch.uint8)
    shapes = {"parameters_m": parameters_m(each), "bytes": data.nbytes}
    with socket_copy(data) as (copy, pid):
        return compared(name, shapes, transfer(each), copy, pairs, [pid_of(each), pid])


# All of it


def names_of(case: Case, size: str, wanted: Sequence[str]) -> dict[str, str]:
    """The measurements of a case: what is sent, and the name. `wanted` are parts of names; none = all."""
    rollouts = {latents: f"rollout {case.name} {size} {latents}" for latents in LATENTS if case.rollout}
    names = {**rollouts, "weights": f"weights {case.name} {size}"}
    return {what: name for what, name in names.items() if not wanted or any(part in name for part in wanted)}


def measure(case: Case, names: Mapping[str, str], model: Path, pairs: int) -> Iterator[list[Ratio]]:
    """Compares one engine that serves the model with the bare work."""
    with tempfile.TemporaryDirectory() as run, served(case, model, Path(run)) as each:
        network = LatentModel(SD3Pipeline(SD3Bundle(path=str(model), dtype="fp32")))
        for what, name in names.items():
            yield weights(name, each, pairs) if what == "weights" else rollout(name, what, each, network, pairs)


def break_down(case: Case, names: Mapping[str, str], model: Path) -> Iterator[dict[str, Any]]:
    """Measures the parts of the same work."""
    with (
        tempfile.TemporaryDirectory() as run,
        case.serve(path=str(model)) as url,
        served(case, model, Path(run), url=url) as each,
        torch.no_grad(),
    ):
        for what, name in names.items():
            if what == "weights":
                yield {name: breakdown(case.weights, transfer(each))}
            else:
                yield {name: breakdown(case.rollout, partial(each.engine.generate, request_of(each, what)))}


def main(pairs: int, wanted: Sequence[str], path: str | None) -> None:
    """Measures all cases, and records each result when it is there."""
    file = None if path is None else Path(path)
    with tempfile.TemporaryDirectory() as folder:
        for size, changes in SIZES.items():
            model = write_model(Path(folder) / size, changes)
            for case in CASES:
                names = names_of(case, size, wanted)
                if not names:
                    continue
                for results in measure(case, names, model, pairs):
                    record(file, results, {})
                for parts in break_down(case, names, model):
                    print(json.dumps(parts, indent=1), flush=True)
                    record(file, [], parts)


def record(path: Path | None, results: Sequence[Ratio], parts: Mapping[str, Any]) -> None:
    """Adds results to a file, which keeps those of other measurements."""
    if path is None:
        return
    former = json.loads(path.read_text()) if path.exists() else {"results": [], "breakdown": {}}
    names = {each.name for each in results}
    kept = [each for each in former["results"] if each["name"] not in names]
    content = {
        "machine": machine(),
        "results": kept + [asdict(each) for each in results],
        "breakdown": former["breakdown"] | dict(parts),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    args = measuring(__doc__.splitlines()[0], pairs=10).parse_args()
    main(args.pairs, args.cases, args.json)
