"""The part of check_engine_package.py about SGLang's diffusion server: its requests, and a real server of tiny models.

python scripts/check_engine_package.py --engine sglang --python sglang-env/bin/python [--serve settings.yaml]
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

from scripts.engine_client import (
    Client,
    Exchange,
    Json,
    answer_of,
    check_payload,
    classes_of,
    compare,
    read_requests,
)

CLASSES = {
    "/rollout/generate": "RolloutRequest",
    "/update_weights_from_tensor": "UpdateWeightFromTensorReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_tensor_checker": "UpdateWeightFromTensorCheckerReqInput",
    "/get_weights_checksum": "GetWeightsChecksumReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Path to the class of the package that has the fields of the body."""
PACKAGES = ("sglang", "torch", "transformers", "diffusers")
SIDE = 64
"""Pixels of the samples of a real server."""
CASES = (
    ("sd3", "full", "http", "fp32"),
    ("sd3", "adapters", "http", "fp32"),
    ("flux2_klein", "merged", "http", "fp32"),
    ("qwen_image", "full", "http", "fp32"),
    ("qwen_image", "adapters", "http", "fp32"),
    ("sd3", "full", "http", "bf16"),
    ("sd3", "full", "ipc", "fp32"),
)
"""Families, kinds of weights, transports and dtypes for which the real server is started."""
KLEIN_TEXT_LAYERS = 36
"""SGLang joins the hidden states of layers 9, 18 and 27 of Klein's text encoder, so the tiny one needs as many."""


class DiffusionClient(Client):
    """A trainer of a tiny diffusion model and SGLang's engine, whose requests are recorded."""

    engine_class: ClassVar[str] = "unirl.rollout.engine.sglang.engine:SGLangRolloutEngine"
    side = 32
    """Pixels of its samples."""
    length = 16
    """Text tokens of its prompts."""

    @classmethod
    @contextmanager
    def named(cls, family: str, kind: str, **settings: Any) -> Iterator[Self]:
        """As `of`, with the name of the model of a family, which SGLang asks for."""
        from unirl.rollout.engine.sglang.families import FAMILIES

        with cls.of(family, kind, model_id=FAMILIES[family].model_id, **settings) as each:
            yield each

    def request(self, weights: str = "live", **params: Any) -> Any:
        """A request for three prompts with two samples each, of four steps with noise in the first two."""
        from unirl.sde.kernels import FlowSDEStrategy
        from unirl.testing.bundle import request_of
        from unirl.types.sampling import DiffusionSamplingParams

        values: Json = {"kernel": FlowSDEStrategy(), "num_inference_steps": 4, "height": self.side, "width": self.side}
        values |= {"samples_per_prompt": 2, "sde_indices": (0, 1), "max_sequence_length": self.length, **params}
        settings = DiffusionSamplingParams(**values)
        facts = self.engine.facts()
        pinned = settings.pinned(0, facts.schedule.sigmas(4, facts.image_seq_len(settings)).tolist())
        req = request_of(("a red circle", "two cats", "a house in the fog"), "image", pinned)
        return req.expand(2).from_weights(weights, self.backend.updates)

    def gap(self, **params: object) -> float:
        """The largest difference between the server's log-probs and the trainer's replay of its latents."""
        import torch

        track = self.engine.generate(self.request(**params)).tracks["image"]
        with torch.no_grad():
            replay = self.trained.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
        return float((track.segment.logp - replay.logp).abs().max())

    def use_all_requests(self) -> None:
        """Push, sample without and with guidance, sleep and wake up."""
        self.push()
        self.train(0)
        self.push()
        self.gap()
        self.gap(guidance_scale=4.0, negative_prompt="blurred")
        self.engine.sleep()
        self.engine.wake_up()

    def path_gap(self) -> Json:
        """The largest difference of the last latents of a path of Euler steps, and its size."""
        import torch

        from unirl.rollout.engine.serving.engine import seeds_of
        from unirl.sde.noise import NoiseSource
        from unirl.types.sampling import DiffusionSamplingParams

        req = self.request(sde_indices=())
        _, params = req.only_track(DiffusionSamplingParams)
        ours = self.engine.generate(req).tracks["image"].segment.final
        shape = self.trained.facts.latent_shape(params)
        x_T = torch.cat([self.engine.server.draws(seed, shape, 1) for seed in seeds_of(req, params, "x")])  # noqa: N806
        with torch.no_grad():
            conditions = self.trained.conditions_of(req, params)
            theirs = self.trained.stage.sample(conditions, x_T, params, NoiseSource(0, "r", 0), req.sample_ids).final
        return {"difference": float((ours - theirs).abs().max()), "largest_latent": float(theirs.abs().max())}


def requests_of_the_engine() -> list[Exchange]:
    """All kinds of requests that the engine sends, recorded against a fake server."""
    from tests.fake_servers import sglang_diffusion

    exchanges: list[Exchange] = []
    for kind, transport in (("full", "http"), ("adapters", "http"), ("full", "ipc")):
        settings: Json = {"program": "fake", "transport": transport}
        with sglang_diffusion() as url, DiffusionClient.named("sd3", kind, url=url, **settings) as each:
            each.use_all_requests()
            each.engine.generate(each.request(sde_indices=()))
            exchanges += each.exchanges
    for exchange in exchanges:
        if exchange.path == "/update_weights_from_disk":
            exchange.body["model_path"] = "model"  # a temporary folder
    return exchanges


def arguments() -> list[str]:
    """The arguments of a server that the engine would start, without the command."""
    with DiffusionClient.named("sd3", "adapters", python_executable="python") as each:
        words: list[str] = each.prepared().words("python", 30000)[3:]
    # Ports that are free now, and a folder that is gone.
    return ["30001" if word.isdigit() and int(word) > 1 else word for word in words]


# In the environment of the server, without unirl


def inside(given: Json) -> Json:
    """Read the requests with the classes of the package. Raises an exception for one that they refuse."""
    import argparse

    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    result = read_requests(given, PACKAGES, read_request)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.parse_args(given["arguments"])
    return result


def read_request(path: str, body: Json) -> None:
    """Raises an exception for a request that the package refuses, or of which it ignores a field."""
    import dataclasses

    from sglang.multimodal_gen.configs.sample.stablediffusion3 import StableDiffusion3SamplingParams
    from sglang.multimodal_gen.runtime.entrypoints.post_training import io_struct
    from sglang.multimodal_gen.runtime.entrypoints.post_training.rollout_api import _build_sampling_kwargs

    kind = getattr(io_struct, CLASSES[path])
    fields = kind.model_fields if path == "/rollout/generate" else [each.name for each in dataclasses.fields(kind)]
    unknown = set(body) - set(fields)
    assert not unknown, f"{path}: sglang would ignore {sorted(unknown)}"
    parsed = kind(**body)
    if path == "/rollout/generate":
        keys = _build_sampling_kwargs(parsed)
        known = {each.name for each in dataclasses.fields(StableDiffusion3SamplingParams)} | {"max_sequence_length"}
        assert set(keys) <= known, set(keys) - known
        StableDiffusion3SamplingParams(**keys)
    check_payload(path, body)


# A real server


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real server with tiny models, and compare it with the trainer."""
    own = {"python_executable": python, "concurrency": 2, **settings}
    runs = ((", ".join(case), of_written_model(*case, **own)) for case in CASES)
    results, answers = compare(runs, checked, answer_of)
    answers["GET /model_info"]["body"]["model_path"] = "model"
    return {"settings": {"engine_args": settings.get("engine_args", {})}, "results": results, "answers": answers}


@contextmanager
def of_written_model(family: str, kind: str, transport: str, dtype: str, **settings: Any) -> Iterator[DiffusionClient]:
    """A client whose engine starts a server of a tiny model in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_model(family, path)
        keys = {"dtype": dtype, "path": str(path), "transport": transport, **settings}
        with DiffusionClient.named(family, kind, **keys) as each:
            each.side, each.length = SIDE, {"sd3": 256, "flux2_klein": 512, "qwen_image": 64}[family]
            yield each


def write_model(family: str, folder: Path) -> None:
    """The tiny model of a family as a folder."""
    bundle, pipeline = classes_of(family)
    pipeline(bundle(path="toy", dtype="fp32")).write_model({}, folder)
    change = {"flux2_klein": add_text_layers, "qwen_image": untie_text_encoder}.get(family)
    if change is not None:
        change(folder)


def untie_text_encoder(folder: Path) -> None:
    """Store the head of the text encoder, which SGLang looks for, although that of the tiny model is tied."""
    from safetensors.torch import load_file, save_file

    [file] = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(file)
    [embeddings] = [tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")]
    save_file(tensors | {"lm_head.weight": embeddings.clone()}, file, {"format": "pt"})


def add_text_layers(folder: Path) -> None:
    """Give the text encoder of Klein as many layers as SGLang reads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / "text_encoder")
    config.num_hidden_layers = KLEIN_TEXT_LAYERS
    config.layer_types = ["full_attention"] * KLEIN_TEXT_LAYERS
    shutil.rmtree(folder / "text_encoder")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "text_encoder")


def checked(each: DiffusionClient, name: str) -> Json:
    """Push, sample and compare, before and after updates, asleep and awake, and for the first case after a kill."""
    result = each.begin()
    gaps = result["largest_logp_differences"]
    gaps["initial weights"] = each.gap()
    gaps["guidance 4"] = each.gap(guidance_scale=4.0, negative_prompt="blurred")
    each.check_updates(result)
    result["euler_path"] = each.path_gap()
    each.engine.sleep()
    each.engine.wake_up()
    gaps["after sleep"] = each.gap()
    if name == ", ".join(CASES[0]):
        each.check_kill(result)
    return result
