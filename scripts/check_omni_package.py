"""The part of check_engine_package.py about vLLM-Omni: the requests of its engine, and a real server of tiny models.

    python scripts/check_engine_package.py --engine vllm_omni --python omni-env/bin/python [--serve settings.yaml]

On a machine without a GPU, `--serve scripts/vllm_omni_on_cpu/settings.yaml` runs vLLM-Omni on the CPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from scripts.check_diffusion_package import DiffusionClient
from scripts.engine_client import Exchange, Json, answer_of, classes_of, compare, read_requests

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


class OmniClient(DiffusionClient):
    """A trainer of a tiny diffusion model and vLLM-Omni's engine."""

    engine_class: ClassVar[str] = "unirl.rollout.engine.vllm_omni.engine:VLLMOmniRolloutEngine"

    def readable(self, content: bytes) -> Json:
        """A body as JSON. The bytes of a bucket of weights are left out."""
        from unirl.rollout.engine.vllm_omni.program.wire import bucket_parts

        return super().readable(content) if content.startswith(b"{") else bucket_parts(memoryview(content))[0]


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from tests.fake_servers import vllm_omni

    exchanges: list[Exchange] = []
    settings: Json = {"program": "fake", "concurrency": 1}  # one after another, so that their order is always the same
    for kind, transport in (("full", "http"), ("adapters", "ipc")):
        with vllm_omni() as url, OmniClient.of("sd3", kind, url=url, transport=transport, **settings) as each:
            each.use_all_requests()
            exchanges += [each for each in each.exchanges if each.path != "/weights/open"]  # its path is random
    return exchanges


def arguments() -> Json:
    """The settings of a server that the engine would start, without its folder."""
    with OmniClient.of("sd3", "full", program="fake") as each:
        settings: Json = each.prepared().engine_settings()
        return settings | {"model": "model"}


# In the environment of the server


def inside(given: Json) -> Json:
    """Read the requests with the classes of the package. Raises an exception for one that they refuse."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.sched.request_scheduler import build_request_batch_sampling_params_key
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerWrapperBase

    from unirl.rollout.engine.vllm_omni.program import serve
    from unirl.rollout.engine.vllm_omni.program.trajectory import Schedule
    from unirl.rollout.engine.vllm_omni.program.worker import SamplingWorker

    def read(path: str, body: Json) -> None:
        if path == "/sample":
            made = serve.request_of(body, None)
            build_request_batch_sampling_params_key(made)
            assert made.sampling_params.guidance_scale_provided
            assert len(Schedule.of(body).steps) == made.sampling_params.num_inference_steps
        if path == "/weights/begin" and body["adapter"] is not None:
            helper = PEFTHelper.from_dict({**body["adapter"], "target_modules": ["attn.to_q"]})
            assert not helper._validate_features()

    result = read_requests(given, PACKAGES, read)
    OmniDiffusionConfig.from_kwargs(worker_extension_cls=serve.EXTENSION, num_gpus=1, **given["arguments"])
    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    vars(wrapper).update(
        base_worker_class=DiffusionWorker, worker_extension_cls=serve.EXTENSION, uses_custom_pipeline=False
    )
    mixed = wrapper._prepare_worker_class()
    assert mixed.__mro__[1:3] == (SamplingWorker, DiffusionWorker), mixed.__mro__
    return result


# A real server


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real server with tiny models, and compare it with the trainer."""
    runs = ((", ".join(case), of_written_model(*case, python_executable=python, **settings)) for case in CASES)
    results, _ = compare(runs, checked, answer_of)
    return {"settings": {"engine_args": settings.get("engine_args", {})}, "results": results}


@contextmanager
def of_written_model(family: str, kind: str, transport: str, dtype: str, **settings: Any) -> Iterator[OmniClient]:
    """A client whose engine starts a server of a tiny model in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_model(family, path, dtype)
        keys = {"dtype": dtype, "path": str(path), "transport": transport, **settings}
        with OmniClient.of(family, kind, **keys) as each:
            yield each


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


def checked(each: OmniClient, name: str) -> Json:
    """Push, sample and compare, before and after updates, and for the first case after a kill."""
    result = each.begin()
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
    if name == ", ".join(CASES[0]):
        result["euler_path"] = each.path_gap()
        each.check_kill(result)
    return result
