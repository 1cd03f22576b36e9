"""A diffusion server of SGLang (sglang.multimodal_gen, 0.5.23): its command line, its requests, and its weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from unirl.config.errors import EngineError, IncompatibleError, SyncError
from unirl.config.http import Reply
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, pipeline_class
from unirl.rollout.engine.serving.fake import fake_command
from unirl.rollout.engine.serving.http_server import option_words
from unirl.rollout.engine.serving.latent_server import (
    LatentAnswer,
    LatentFamily,
    LatentRequest,
    LatentServer,
    check_density,
)
from unirl.rollout.engine.serving.process import LOOPBACK, free_port
from unirl.rollout.engine.serving.settings import InstalledServerSettings, ServerTransport
from unirl.rollout.engine.serving.sigma_verify import UsedSettings
from unirl.rollout.engine.sglang import messages
from unirl.rollout.engine.sglang.families import FAMILIES
from unirl.rollout.engine.sglang.shared_file import SharedFile
from unirl.rollout.engine.sglang_llm.messages import Outcome
from unirl.rollout.engine.sglang_llm.server import Program
from unirl.types.device import CPU
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Kernel
from unirl.types.sampling import DiffusionSamplingParams

LoraMergeMode = Literal["dynamic", "merge", "auto"]
LAYERS = re.compile(r"Updated (\d+) LoRA layers .* \(skipped (\d+) unknown layers\)")
PRECISIONS: Mapping[torch.dtype, str] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(kw_only=True)
class SGLangDiffusionSettings(InstalledServerSettings):
    """Settings of SGLang's diffusion server. It computes one sample after the other, whatever `concurrency` is."""

    environment: ClassVar[str] = "sglang"

    program: Program = "sglang"
    """The server that is started: `sglang`, or `fake`, a small server of UniRL that speaks the same protocol, runs on a
    CPU without sglang, and is used at scale=toy."""
    model_id: str | None = None
    """The name of the model on the hub without the owner, such as stable-diffusion-3.5-medium, if bundle.path is a
    folder. Absent: the end of bundle.path."""
    tp_size: int = 1
    """Tensor-parallel ranks of a server that the engine starts."""
    lora_merge_mode: LoraMergeMode = "dynamic"
    """The word dynamic adds adapters in every forward, in their own dtype. The word merge adds them to the weights,
    which is faster and rounds small updates away in bfloat16; auto lets SGLang choose."""
    transport: ServerTransport = "http"
    """The way of weights from the engine to its server. http: in requests. ipc: a file in the main memory of the
    machine, which both must share. Adapters travel in requests."""
    verify_weights: bool = True
    """Compare a checksum of the server's weights after every rollout, since its answers do not name the weights. It
    reads all weights of the trained module."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the server, such as {attention_backend: fa}."""


class SGLangDiffusionServer(LatentServer):
    """A process of `sglang.multimodal_gen`, or a server that runs at `rollout.url`."""

    name: ClassVar[str] = "SGLang"
    health: ClassVar[str] = "/health"
    own_arguments: ClassVar[Collection[str]] = (
        *("model_path", "model_id", "host", "port", "scheduler_port", "master_port", "backend", "num_gpus", "tp_size"),
        *("base_gpu_id", "dit_precision", "text_encoder_precisions", "lora_merge_mode", "warmup_mode"),
    )
    families: ClassVar[Mapping[str, LatentFamily]] = FAMILIES
    settings: SGLangDiffusionSettings

    def __init__(
        self, pipeline: DiffusersPipeline[Any], folder: Path, log: Path, settings: SGLangDiffusionSettings
    ) -> None:
        super().__init__(pipeline, folder, log, settings)
        self.family = FAMILIES[pipeline.facts.family]
        self.extra_words = option_words(settings.engine_args)
        self.hashes: dict[str, str] = {}
        """The hashes of the tensors of the last transfer, by their names in requests."""
        self.parts: Mapping[str, Tensor] = {}
        """Tensors of fused layers whose other parts are still under way."""
        self.adapter_tensors: dict[str, Tensor] = {}
        """The adapter that is under way, by the names of its tensors in requests."""
        self.file = SharedFile(folder / "sent", messages.MODULE) if settings.transport == "ipc" else None
        """The way of whole weights if `rollout.transport` is ipc."""
        self.checksum = ""
        """The checksum of the server's weights after the last transfer."""
        self.checksum_of: dict[str, str] = {}
        """The hash of all tensors of a transfer to the checksum that the server reported then, for the last one."""

    # The process

    @property
    def model_id(self) -> str:
        """The name by which SGLang recognises the model."""
        bundle = self.pipeline.bundle
        if self.settings.model_id is not None:
            return self.settings.model_id
        return self.family.model_id if bundle.root is None else bundle.path.rpartition("/")[2]

    def words(self, python: str, port: int) -> list[str]:
        own = ["--port", str(port), "--model-id", self.model_id, "--dit-precision", self._precision]
        if self.settings.is_fake:
            fake = fake_command("sglang", self.pipeline, self.root, port)
            return [*fake, "--", "--model-id", self.model_id, *self._flags(), *self.extra_words]
        launch = [python, "-m", "sglang.multimodal_gen.runtime.launch_server", "--model-path", str(self.root)]
        encoders = ["--text-encoder-precisions", *[self._precision] * self.family.num_text_encoders]
        ports = ["--scheduler-port", str(free_port()), "--master-port", str(free_port())]
        return [*launch, "--host", LOOPBACK, *own, *ports, *encoders, *self._flags(), *self.extra_words]

    @property
    def _precision(self) -> str:
        return PRECISIONS[self.pipeline.bundle.dtype]

    def _flags(self) -> list[str]:
        """The arguments that follow from the settings and the device."""
        settings, device = self.settings, self.pipeline.bundle.device
        flags = ["--backend", "sglang", "--warmup-mode", "off", "--lora-merge-mode", settings.lora_merge_mode]
        flags += ["--num-gpus", str(settings.tp_size), "--tp-size", str(settings.tp_size)]
        return flags + (["--base-gpu-id", str(device.index)] if device.type != "cpu" and device.index else [])

    def check_ready(self) -> None:
        model = self.get("/model_info", messages.DiffusionModelInfo)
        wanted = pipeline_class(self.pipeline.bundle).__name__
        if model.architectures != [wanted]:
            raise self.mismatch(
                f"serves {', '.join(model.architectures)} ({model.model_path}), and the recipe trains {wanted}",
                f"Start it with --model-path {self.root}",
            )

    def restore(self) -> bool:
        self.checksum_of = {}
        return not self.weights_name

    # Samples

    def served(self, facts: LatentFacts) -> LatentFacts:
        return self.family.served(facts)

    @classmethod
    def check_levels(cls, params: DiffusionSamplingParams) -> None:
        if params.sigmas is not None or params.tail_fraction is not None:
            key = "sigmas" if params.sigmas is not None else "tail_fraction"
            raise IncompatibleError(f"sampling.{key}: SGLang takes no noise levels, and makes its own. Remove it")

    @classmethod
    def check_kernel(cls, kernel: Kernel) -> None:
        if type(kernel) not in messages.KERNELS:
            known, name = " or ".join(kind.__name__ for kind in messages.KERNELS), type(kernel).__name__
            raise IncompatibleError(f"sampling.kernel: SGLang has no {name}. Use {known} of unirl.sde.kernels")
        check_density(cls.name, kernel)

    def sample(self, request: LatentRequest, params: DiffusionSamplingParams, positions: Sequence[int]) -> LatentAnswer:
        length = None if self.sequence_length is not None else params.max_sequence_length + self.family.extra_tokens
        blank = self.family.blank
        prompt, params = request.prompt or blank, replace(params, negative_prompt=params.negative_prompt or blank)
        body = messages.generate(prompt, request.seed, params, positions, self._noise_device.type, length)
        rows = self._read_samples(self.post("/rollout/generate", body))
        if len(rows) != 1:
            raise EngineError(f"{self.name} answered {request.id} with {len(rows)} samples, and one was asked for")
        [row] = rows
        if (row.prompt, row.seed) != (prompt, request.seed):
            raise EngineError(f"{self.name} answered {request.id} with the sample of seed {row.seed}, {row.prompt!r}")
        trajectory = row.dit_trajectory
        try:
            latents, timesteps = trajectory.latents.tensor(), trajectory.timesteps.tensor()
            sigmas, logps = trajectory.sigmas.tensor(), row.rollout_log_probs.tensor()
        except ValueError as error:
            raise EngineError(f"{self.name}: a tensor of its answer to {request.id} cannot be read: {error}") from error
        steps = params.sde_indices or ()
        if len(timesteps) != len(positions) or len(logps) != params.num_inference_steps:
            raise EngineError(
                f"{self.name}: its answer to {request.id} has {len(timesteps)} positions and {len(logps)} log-probs; "
                f"{len(positions)} positions of {params.num_inference_steps} steps were asked for"
            )
        # The log-prob of a deterministic step is 0, and that of a stochastic one is not: it may be NaN.
        stochastic = (logps != 0).nonzero().flatten().tolist()
        used = UsedSettings(
            sigmas=sigmas.tolist(),
            timesteps=dict(zip(positions, timesteps.tolist(), strict=True)),
            sde_indices=stochastic,
            guidance_scales=None,
        )
        shape = self.pipeline.facts.latent_shape(params)
        kept = logps[list(steps)].float()
        return LatentAnswer(used, self.family.unpacked(latents, shape), kept, None)

    def _read_samples(self, reply: Reply) -> list[messages.Rollout]:
        try:
            return msgspec.msgpack.decode(reply.body, type=list[messages.Rollout])
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: an answer cannot be read: {error}") from error

    @property
    def _noise_device(self) -> torch.device:
        """The device that draws noise. A server on a GPU can only draw the noise of its steps there."""
        return CPU if self.settings.is_fake else self.pipeline.bundle.device

    def draws(self, seed: int, shape: Sequence[int], count: int) -> Tensor:
        device = self._noise_device
        generator = torch.Generator(device).manual_seed(seed)
        first = torch.randn((1, *shape), generator=generator, device=device)
        packed = (1, *self.family.packed_shape(shape))
        steps = [torch.randn(packed, generator=generator, device=device) for _ in range(count - 1)]
        return torch.cat([first, *[self.family.unpacked(step, shape) for step in steps]]).cpu()

    # Weights

    def begin_weights(self, name: str) -> None:
        self.weights_name, self.has_lost_weights = name, False
        self.hashes, self.adapter_tensors, self.parts = {}, {}, {}

    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        named = {self.wire[name]: tensor for name, tensor in tensors.items()}
        if self._sends_adapter:
            self.hashes |= {name: messages.tensor_hash(tensor) for name, tensor in named.items()}
            self.adapter_tensors |= messages.copied(named)
            return
        whole, waiting = self.family.joined({**self.parts, **named})
        self.hashes |= {name: messages.tensor_hash(tensor) for name, tensor in whole.items()}
        self.parts = messages.copied(waiting)
        if self.file is None:
            self._change("/update_weights_from_tensor", messages.weights_from_tensors(named))
        else:
            self.file.write(named)
            self._change("/update_weights_from_disk", messages.weights_from_folder(self.file.folder))

    def end_weights(self) -> None:
        if self._sends_adapter:
            self._replace_adapter()
        else:
            self._change("/update_weights_from_tensor_checker", messages.expected_tensors(self.hashes))
        self.checksum = self._checksum()
        sent = repr(sorted(self.hashes.items()))
        for former, checksum in self.checksum_of.items():
            if (former == sent) != (checksum == self.checksum):
                values = "the same" if former == sent else "new"
                reported = "another checksum" if former == sent else "the checksum of the old ones"
                raise SyncError(
                    f"{values} weights were sent, and {self.name} reports {reported} ({self.checksum[:16]}): it did "
                    "not take them over, or another program changed them"
                )
        self.checksum_of = {sent: self.checksum}

    def _replace_adapter(self) -> None:
        assert self.layout is not None and self.layout.adapter is not None, "prepare comes first"
        body = messages.adapter_from_tensors(self.adapter_tensors, self.layout.adapter)
        outcome = self._change("/update_weights_from_tensor", body)
        self.adapter_tensors = {}
        match, sent = LAYERS.search(outcome.message), len(self.wire) // 2
        if match is None or (int(match[1]), int(match[2])) != (sent, 0):
            raise SyncError(f"adapters of {sent} layers were sent, and {self.name} answered: {outcome.message}")

    def current_weights(self) -> str:
        if not self.settings.verify_weights:
            return self.weights_name
        checksum = self._checksum()
        return self.weights_name if checksum == self.checksum else f"those with the checksum {checksum[:16]}"

    @property
    def _sends_adapter(self) -> bool:
        return self.layout is not None and self.layout.payload == "adapter"

    def _checksum(self) -> str:
        """The checksum of all weights of the trained module."""
        reply = self.insist_on("/get_weights_checksum", {"module_names": [messages.MODULE]})
        return self.read(reply, dict[str, str])[messages.MODULE]

    def _change(self, path: str, body: messages.Body) -> Outcome:
        """The answer to a request about weights. Raises SyncError if the server reports that it failed."""
        outcome = self.read(self.insist_on(path, body), Outcome)
        if not outcome.success:
            raise SyncError(f"{self.name}: {path} failed: {outcome.message}")
        return outcome

    # Sleep

    def sleep(self) -> None:
        self.recover()
        self._change("/release_memory_occupation", {})

    def wake_up(self) -> None:
        self.recover()
        self._change("/resume_memory_occupation", {})
        if self.checksum and self._checksum() != self.checksum:
            raise SyncError(f"{self.name} has other weights after its sleep than before: see {self.log}")
