"""A server of vLLM-Omni: a program of UniRL (program/serve.py) in the environment of vllm-omni (0.30.0)."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

import unirl
from unirl.config.errors import EngineError, IncompatibleError, SyncError
from unirl.config.http import Reply
from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.rollout.engine.serving.fake import fake_command
from unirl.rollout.engine.serving.http_server import shown
from unirl.rollout.engine.serving.latent_server import (
    LatentAnswer,
    LatentFamily,
    LatentRequest,
    LatentServer,
    check_density,
)
from unirl.rollout.engine.serving.settings import InstalledServerSettings, ServerTransport
from unirl.rollout.engine.serving.sigma_verify import UsedSettings
from unirl.rollout.engine.vllm_omni import messages
from unirl.rollout.engine.vllm_omni.families import FAMILIES
from unirl.rollout.engine.vllm_omni.program.trajectory import seeded_draws
from unirl.rollout.engine.vllm_omni.program.wire import read_fingerprints
from unirl.rollout.engine.vllm_omni.transports import TRANSPORTS, WeightTransport
from unirl.sde.kernels import LinearKernel
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Kernel
from unirl.types.sampling import DiffusionSamplingParams

VERSION = "0.30.0"
"""The version of vllm-omni that the program was written against."""
PROGRAM = "unirl.rollout.engine.vllm_omni.program.serve"
VISIBLE = "CUDA_VISIBLE_DEVICES"
Program = Literal["vllm_omni", "fake"]


@dataclass(kw_only=True)
class VLLMOmniSettings(InstalledServerSettings):
    """Settings of a server of vLLM-Omni."""

    environment: ClassVar[str] = "vllm_omni"

    program: Program = "vllm_omni"
    """The server that is started: `vllm_omni`, or `fake`, a small server of UniRL that speaks the same protocol, runs
    on a CPU without vllm-omni, and is used at scale=toy."""
    transport: ServerTransport = "http"
    """The way of weights from the engine to its server. http: in requests, through main memory. ipc: a buffer on the
    device that both share, by CUDA IPC."""
    max_num_seqs: int = 1
    """Samples that share a forward. With more than 1 the bits of a sample depend on the others."""
    enable_sleep_mode: bool = True
    """Let the server free its device memory while the trainer uses it. It is needed where both share devices, and works
    on a GPU only."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """Further fields of OmniDiffusionConfig of vLLM-Omni, such as {enforce_eager: true}."""


class VLLMOmniServer(LatentServer):
    """A process with vLLM-Omni, or one that runs at `rollout.url`."""

    name: ClassVar[str] = "vLLM-Omni"
    health: ClassVar[str] = "/health"
    own_arguments: ClassVar[Collection[str]] = (
        *("model", "model_class_name", "dtype", "num_gpus", "worker_extension_cls", "enable_sleep_mode"),
    )
    """Fields of `OmniDiffusionConfig` that this file sets, or the program."""
    families: ClassVar[Mapping[str, LatentFamily]] = FAMILIES
    settings: VLLMOmniSettings

    def __init__(self, pipeline: DiffusersPipeline[Any], folder: Path, log: Path, settings: VLLMOmniSettings) -> None:
        super().__init__(pipeline, folder, log, settings)
        self.family = FAMILIES[pipeline.facts.family]
        self.held: Mapping[str, Fingerprint] = {}
        """The fingerprints that the server reported after the last transfer, by their names in requests."""
        self.can_sleep = False
        self.weights: WeightTransport = TRANSPORTS[settings.transport](self, self._server_device)

    # The process

    @property
    def _server_device(self) -> torch.device:
        """The device of a server that is started here. A fake one has the CPU."""
        return torch.device("cpu") if self.settings.is_fake else self.pipeline.bundle.device

    def engine_settings(self) -> dict[str, object]:
        """The fields of `OmniDiffusionConfig`."""
        own = {
            "model": str(self.root),
            "model_class_name": self.family.pipeline,
            "dtype": self.dtype,
            "enable_sleep_mode": self.settings.enable_sleep_mode,
            "max_num_seqs": self.settings.max_num_seqs,
        }
        given = self.pipeline.bundle.configs.settings
        own |= {name: given[name] for name in self.family.settings if name in given}
        return own | dict(self.settings.engine_args)

    def words(self, python: str, port: int) -> list[str]:
        if self.settings.is_fake:
            return fake_command("vllm_omni", self.pipeline, self.root, port)
        return [python, "-m", PROGRAM, "--port", str(port), "--settings", json.dumps(self.engine_settings())]

    def env(self) -> Mapping[str, str]:
        own = dict(super().env())
        if self.settings.is_fake:
            return own
        paths = [str(self._program_folder()), *([own.pop("PYTHONPATH")] if "PYTHONPATH" in own else [])]
        return {"PYTHONPATH": os.pathsep.join(paths), **self._device(), **own}

    def _program_folder(self) -> Path:
        """A folder with a link to UniRL and nothing else, so that the server finds the program and no other package."""
        folder = self.folder / "program"
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "unirl"
        if not link.exists():
            link.symlink_to(Path(unirl.__file__).parent)
        return folder

    def _device(self) -> Mapping[str, str]:
        """The variable that shows the server the device of this process alone."""
        device = self._server_device
        if device.type == "cpu":
            return {}
        index, visible = device.index or 0, os.environ.get(VISIBLE)
        return {VISIBLE: visible.split(",")[index] if visible else str(index)}

    def check_ready(self) -> None:
        info = self.get("/info", messages.OmniInfo)
        wanted = {"pipeline": self.family.pipeline, "dtype": self.dtype}
        for key, value in wanted.items():
            has = {"pipeline": info.pipeline, "dtype": info.dtype}[key]
            if has != value:
                raise self.mismatch(
                    f"has {key} {has} ({info.model}), and the recipe needs {value}",
                    f"Start it with the model in {self.root} and dtype {self.dtype}",
                )
        if info.engine == "vllm-omni" and info.version != VERSION:
            raise self.mismatch(
                f"is of version {info.version}; the program of UniRL is for {VERSION}",
                f"Install vllm-omni=={VERSION} in its environment",
            )
        self.can_sleep = info.can_sleep

    def restore(self) -> bool:
        self.weights.reset()
        return not self.weights_name

    # Samples

    def served(self, facts: LatentFacts) -> LatentFacts:
        return facts  # it takes the noise levels of a request

    @classmethod
    def check_kernel(cls, kernel: Kernel) -> None:
        if not isinstance(kernel, LinearKernel) or kernel.multistep:
            raise IncompatibleError(
                f"sampling.kernel: {cls.name} takes kernels whose mean is linear in x and v, and "
                f"{type(kernel).__name__} is none. Use FlowSDEStrategy, DanceSDEStrategy or CPSSDEStrategy of "
                "unirl.sde.kernels"
            )
        check_density(cls.name, kernel)

    def sample(self, request: LatentRequest, params: DiffusionSamplingParams, positions: Sequence[int]) -> LatentAnswer:
        body = self.order(request, params, positions)
        tensors, facts = self._read_sample(request.id, self.post("/sample", body))
        if (facts.id, facts.prompt) != (request.id, body["prompt"]):
            raise EngineError(f"{self.name} answered {request.id} with the sample of {facts.id}, {facts.prompt!r}")
        timesteps = tensors["timesteps"].tolist()
        used = UsedSettings(
            sigmas=tensors["sigmas"].tolist(),
            timesteps=dict(enumerate(timesteps)),
            sde_indices=params.sde_indices or (),
            guidance_scales=tensors["guidance_scales"].tolist(),
        )
        return LatentAnswer(used, tensors["latents"], tensors["logp"].float(), facts.weights)

    def order(self, request: LatentRequest, params: DiffusionSamplingParams, positions: Sequence[int]) -> messages.Body:
        """The body of the request for a sample."""
        length = self.sequence_length or params.max_sequence_length
        return messages.order(request, params, positions, self.pipeline.facts, self.family, length)

    def _read_sample(self, id: str, reply: Reply) -> tuple[dict[str, Tensor], messages.SampleFacts]:
        """The tensors and facts in an answer. Raises EngineError for one that cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(reply.body)
            length = int.from_bytes(reply.body[:8], "little")
            header = msgspec.json.decode(reply.body[8 : 8 + length])
            facts = msgspec.convert(header["__metadata__"], messages.SampleFacts)
        except (SafetensorError, ValueError, KeyError, msgspec.DecodeError) as error:
            raise EngineError(f"{self.name}: its answer to {id} cannot be read: {error}") from error
        missing = {"latents", "logp", "timesteps", "sigmas", "guidance_scales"} - set(tensors)
        if missing:
            raise EngineError(f"{self.name}: its answer to {id} has no {sorted(missing)[0]}")
        return tensors, facts

    def draws(self, seed: int, shape: Sequence[int], count: int) -> Tensor:
        return seeded_draws(seed, shape, count)

    # Weights

    def begin_weights(self, name: str) -> None:
        assert self.layout is not None, "prepare comes first"
        self.weights_name, self.has_lost_weights = name, False
        self.insist_on("/weights/begin", messages.begin(name, self.layout.adapter))

    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weights.send({self.wire[name]: tensor for name, tensor in tensors.items()})

    def end_weights(self) -> Mapping[str, Fingerprint]:
        self.held = self._fingerprints("/weights/end")
        missing = [name for name, wire in self.wire.items() if wire not in self.held]
        if missing:
            raise SyncError(f"{self.name} has no {missing[0]} ({len(missing)} tensors in all) after the transfer")
        return {name: self.held[wire] for name, wire in self.wire.items()}

    def current_weights(self) -> str:
        name = self.get("/weights", messages.OmniWeights).weights
        return "those of a transfer that has not ended" if name is None else name

    def _fingerprints(self, path: str) -> Mapping[str, Fingerprint]:
        reply = self.insist_on(path, {})
        try:
            return read_fingerprints(self.read(reply, dict[str, Any]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name}: an answer cannot be read: {error}: {shown(reply)}") from error

    # Sleep

    def sleep(self) -> None:
        self.recover()
        if not self.can_sleep:
            raise IncompatibleError(
                f"{self.name} cannot make room for the trainer, with which it shares devices: set "
                "rollout.enable_sleep_mode=true, or give it devices of its own with placement.rollout"
            )
        self.insist_on("/sleep", {})

    def wake_up(self) -> None:
        self.recover()
        self.insist_on("/wake_up", {})
        if self.held and self._fingerprints("/weights/held") != self.held:
            raise SyncError(f"{self.name} has other weights after its sleep than before: see {self.log}")
