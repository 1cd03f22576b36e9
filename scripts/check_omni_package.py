"""The part of check_engine_package.py about vLLM-Omni: the requests of its engine, and a real server of tiny models.

    python scripts/check_engine_package.py --engine vllm_omni --python omni-env/bin/python [--serve settings.yaml]

On a machine without a GPU, `--serve scripts/vllm_omni_on_cpu/settings.yaml` runs vLLM-Omni on the CPU.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.check_diffusion_package import DiffusionClient
from scripts.check_engine_package import Exchange, Json, classes_of, client_of, joined

PACKAGES = ("vllm-omni", "vllm", "torch", "transformers", "diffusers")
CASES = (
    ("sd3", "full", "http", "fp32"),
    ("sd3", "merged", "ipc", "fp32"),
    ("sd3", "adapters", "http", "fp32"),
    ("sd3", "adapters", "ipc", "bf16"),
    ("hunyuan_video15", "full", "ipc", "fp32"),
    ("qwen_image", "full", "http", "fp32"),
    ("qwen_image", "adapters", "http", "fp32"),
    ("qwen_image", "full", "http", "bf16"),
    ("wan22", "full", "http", "fp32"),
    ("wan22", "adapters", "ipc", "fp32"),
    ("wan21", "full", "http", "fp32"),
)
"""Families, kinds of weights, transports and dtypes for which the real server is started."""
SETTINGS: Json = {
    "hunyuan_video15": {"max_sequence_length": 1000},
    "qwen_image": {"max_sequence_length": 64},  # it refuses longer prompts
}
"""Sampling settings by family."""
EXPERTS = {"wan22": 0.92}
"""Families with two experts, and the noise level at which the tiny model changes from one to the other: the first two
of four steps, which are stochastic, then run through one expert each."""
IMAGE_WIDTH = 1152
"""The width of the image embeddings that vLLM-Omni gives HunyuanVideo 1.5, whatever its checkpoint says."""


@dataclass
class OmniClient(DiffusionClient):
    """A trainer and its engine. Bodies that are no JSON are recorded by what they describe."""

    def record(self) -> None:
        http = self.engine.server.http
        if "request" in vars(http):
            return
        plain = http.request

        def request(method: str, path: str, *, content: Any = None, **keys: Any) -> Any:
            reply = plain(method, path, content=content, **keys)
            self.exchanges.append(Exchange(method, path, readable(joined(content) or b"{}"), reply.status, None))
            return reply

        http.request = request


def readable(content: bytes) -> Json:
    """A body as JSON. The bytes of a bucket of weights are left out."""
    from unirl.rollout.engine.vllm_omni.program.wire import bucket_parts

    return json.loads(content) if content.startswith(b"{") else bucket_parts(memoryview(content))[0]


@contextmanager
def omni_client(
    family: str, kind: str, folder: Path, dtype: str = "fp32", path: str = "toy", **settings: Any
) -> Iterator[OmniClient]:
    """A trainer of a tiny model and vLLM-Omni's engine. The server of the engine ends with the block."""
    from unirl.rollout.engine.vllm_omni.engine import VLLMOmniRolloutEngine

    with client_of(VLLMOmniRolloutEngine, OmniClient, family, kind, folder, dtype, path, **settings) as each:
        yield each


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from tests.fake_servers import vllm_omni

    exchanges: list[Exchange] = []
    settings: Json = {"program": "fake", "concurrency": 1}  # one after another, so that their order is always the same
    for kind, transport in (("full", "http"), ("adapters", "ipc")):
        with (
            vllm_omni() as url,
            tempfile.TemporaryDirectory() as folder,
            omni_client("sd3", kind, Path(folder), url=url, transport=transport, **settings) as each,
        ):
            each.use_all_requests()
            exchanges += [each for each in each.exchanges if each.path != "/weights/open"]  # its path is random
    return exchanges


def arguments() -> Json:
    """The settings of a server that the engine would start, without its folder."""
    with tempfile.TemporaryDirectory() as folder, omni_client("sd3", "full", Path(folder), program="fake") as each:
        each.engine.server.prepare(each.sync.train.prepare(False))
        return each.engine.server.engine_settings() | {"model": "model"}


# In the environment of the server


def inside(file: Path) -> Json:
    """Read the requests of `file` with the classes of the package. Raises an exception for one that they refuse."""
    from importlib.metadata import version

    from vllm.lora.peft_helper import PEFTHelper
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.sched.request_scheduler import build_request_batch_sampling_params_key
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerWrapperBase

    from unirl.rollout.engine.vllm_omni.program import serve
    from unirl.rollout.engine.vllm_omni.program.trajectory import Schedule
    from unirl.rollout.engine.vllm_omni.program.worker import SamplingWorker

    given = json.loads(file.read_text())
    counts: dict[str, int] = {}
    for request in given["requests"]:
        path, body = request["path"], request["body"]
        if path == "/sample":
            made = serve.request_of(body, None)
            build_request_batch_sampling_params_key(made)
            assert made.sampling_params.guidance_scale_provided
            assert len(Schedule.of(body).steps) == made.sampling_params.num_inference_steps
        if path == "/weights/begin" and body["adapter"] is not None:
            helper = PEFTHelper.from_dict({**body["adapter"], "target_modules": ["attn.to_q"]})
            assert not helper._validate_features()
        counts[path] = counts.get(path, 0) + 1
    OmniDiffusionConfig.from_kwargs(worker_extension_cls=serve.EXTENSION, num_gpus=1, **given["arguments"])
    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    vars(wrapper).update(
        base_worker_class=DiffusionWorker, worker_extension_cls=serve.EXTENSION, uses_custom_pipeline=False
    )
    mixed = wrapper._prepare_worker_class()
    assert mixed.__mro__[1:3] == (SamplingWorker, DiffusionWorker), mixed.__mro__
    packages = {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
    return {"packages": packages, "requests_read": counts}


# A real server


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real server with tiny models, and compare it with the trainer."""
    results: Json = {}
    for case in CASES:
        family, kind, transport, dtype = case
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            write_model(family, path, dtype)
            given = {"python_executable": python, "transport": transport, **settings}
            with omni_client(family, kind, Path(folder), dtype, str(path), **given) as each:
                name = ", ".join(case)
                results[name] = checked(each, is_first=case == CASES[0])
                print(name, json.dumps(results[name]), flush=True)
    return {"settings": {"engine_args": settings.get("engine_args", {})}, "results": results}


def write_model(family: str, folder: Path, dtype: str = "fp32") -> None:
    """The tiny model of a family as a folder. vLLM-Omni loads some text encoders in the dtype of their files."""
    bundle, pipeline = classes_of(family)
    pipeline(bundle(path="toy", dtype=dtype)).write_model({}, folder)
    if family in EXPERTS:
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": EXPERTS[family]}))
    if family != "hunyuan_video15":
        return
    from diffusers import HunyuanVideo15Transformer3DModel

    config = json.loads((folder / "transformer" / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("_")}
    shutil.rmtree(folder / "transformer")
    network = HunyuanVideo15Transformer3DModel.from_config(kept | {"image_embed_dim": IMAGE_WIDTH})
    network.save_pretrained(folder / "transformer")


def checked(each: OmniClient, is_first: bool) -> Json:
    """Push, sample and compare, before and after updates, and after a kill."""
    result: Json = {"start_and_first_push_s": round(each.push(), 1), "largest_logp_differences": {}}
    gaps = result["largest_logp_differences"]
    facts = each.trained.facts
    own: Json = SETTINGS.get(facts.family, {})
    own |= {} if facts.frame_scale is None else {"num_frames": 1 + facts.frame_scale}
    gaps["initial weights"] = each.gap(**own)
    gaps["guidance 4"] = each.gap(guidance_scale=4.0, negative_prompt="blurred", **own)
    if facts.family in EXPERTS:
        gaps["guidance 4 and 3"] = each.gap(guidance_scale=4.0, guidance_scale_2=3.0, **own)
    each.check_updates(result, **own)
    result["tensors_with_equal_fingerprints"] = len(each.engine.server.held)
    if not is_first:
        return result
    result["euler_path"] = each.path_gap()
    each.check_kill(result)
    return result
