"""A SGLang server (SRT, 0.5.23) of one language model: its command line, its requests, and the weights that it gets."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.config.errors import EngineError, IncompatibleError, SyncError
from unirl.config.http import PROBE_TIMEOUT_S, RequestFailed, ServerBusy
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.models.language.pipeline import PlainPrompt, TextPipeline
from unirl.rollout.engine.serving.checkpoint_server import CheckpointServer, CheckpointServerSettings, log_prob_gaps
from unirl.rollout.engine.serving.checksums import SentTensors
from unirl.rollout.engine.serving.in_flight import InFlight
from unirl.rollout.engine.serving.payloads import copied
from unirl.rollout.engine.serving.process import LOOPBACK
from unirl.rollout.engine.serving.tokens import TokenAnswer, TokenRequest
from unirl.rollout.engine.sglang_llm import messages
from unirl.types.sampling import ARSamplingParams

PAUSES: Mapping[InFlight, str] = {"abort": "abort", "pause": "retract"}
"""Mode of /pause_generation. `retract` computes keys and values of the tokens so far again, with the new weights."""
PROBED_TOKENS = 32
"""The most likely tokens after a prompt, whose log-probs the probe compares."""
PROBE_TEMPERATURES = (0.0, 2.0)
"""Log-probs are compared at these temperatures. Those of 0 (greedy) are those of 1."""
FLUSH_S = 60
"""Seconds that requests have to end before the server goes to sleep."""
Program = Literal["sglang", "fake"]


@dataclass(kw_only=True)
class SGLangSettings(CheckpointServerSettings):
    """Settings of SGLang's server of a language model."""

    environment: ClassVar[str] = "sglang"

    program: Program = "sglang"
    """The server that is started: `sglang`, or `fake`, a small server of UniRL that speaks the same protocol, runs on a
    CPU without sglang, and is used at scale=toy."""
    mem_fraction_static: float | None = None
    """Share of the device memory for weights and the key-value cache. Absent: SGLang chooses."""
    enable_memory_saver: bool = True
    """Let the server free its device memory while the trainer uses it. A copy of the weights then is in main memory. It
    is needed where both share devices."""


class SGLangServer(CheckpointServer):
    """A process of `sglang.launch_server`, or a server that runs at `rollout.url`."""

    name: ClassVar[str] = "SGLang"
    health: ClassVar[str] = "/ready"
    fake: ClassVar[str] = "sglang_llm"
    seeded: ClassVar[ARSamplingParams] = ARSamplingParams(max_new_tokens=16, temperature=5.0)
    keeps_seeds: ClassVar[str] = "Start the server with --enable-deterministic-inference"
    reads_images: ClassVar[bool] = True
    in_flight_modes: ClassVar[tuple[InFlight, ...]] = ("drain", "abort", "pause")
    own_arguments: ClassVar[Collection[str]] = (
        *("model_path", "host", "port", "dtype", "device", "base_gpu_id", "tp_size", "mem_fraction_static"),
        *("context_length", "enable_deterministic_inference", "enable_memory_saver", "enable_weights_cpu_backup"),
        *("enable_lora", "max_lora_rank", "lora_target_modules", "max_loaded_loras", "max_loras_per_batch"),
    )
    settings: SGLangSettings

    def __init__(self, pipeline: TextPipeline[Any], folder: Path, log: Path, settings: SGLangSettings) -> None:
        super().__init__(pipeline, folder, log, settings)
        self.layout: WeightLayout | None = None
        self.info: messages.ServerInfo | None = None
        self.adapter_tensors: dict[str, Tensor] = {}
        """The adapter that is under way, by the names of its tensors in requests."""
        self.adapter: str | None = None
        """The adapter that requests name."""
        self.is_updating = False
        """True from /begin_weight_update to /end_weight_update."""

    # The process

    def prepare(self, layout: WeightLayout) -> None:
        check_pause(self.settings.in_flight, layout.payload == "adapter")
        self.layout = layout
        super().prepare(layout)

    def launch(self, python: str, port: int) -> list[str]:
        launch = [python, "-m", "sglang.launch_server", "--model-path", str(self.root), "--host", LOOPBACK]
        return [*launch, "--port", str(port), "--dtype", self.dtype]

    def flags(self) -> list[str]:
        settings, device, layout = self.settings, self.pipeline.bundle.device, self.layout
        flags = ["--tp-size", str(settings.tp_size)]
        if device.type == "cpu":
            flags += ["--device", "cpu"]
        elif device.index:
            flags += ["--base-gpu-id", str(device.index)]
        if settings.mem_fraction_static is not None:
            flags += ["--mem-fraction-static", str(settings.mem_fraction_static)]
        if settings.context_length is not None:
            flags += ["--context-length", str(settings.context_length)]
        if settings.deterministic:
            flags += ["--enable-deterministic-inference"]
        if settings.enable_memory_saver:
            flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        if layout is not None and layout.adapter is not None:
            modules = messages.module_names(layout.adapter.targets)
            flags += ["--enable-lora", "--max-lora-rank", str(layout.adapter.rank), "--lora-target-modules", *modules]
            # A new adapter is loaded before the former one is unloaded. The second place is that of the base model.
            flags += ["--max-loaded-loras", "2", "--max-loras-per-batch", "2"]
        return flags

    def check_ready(self) -> None:
        info = self.info = self.get("/server_info", messages.ServerInfo)
        model, family = self.get("/model_info", messages.ModelInfo), self.pipeline.bundle.family.name
        has_lora = self.layout is not None and self.layout.adapter is not None
        if model.model_type not in (None, family):
            what = f"serves a model of type {model.model_type} ({model.model_path}), not {family}"
            raise self.mismatch(what, f"Start it with {self.root}")
        if info.dtype not in (self.dtype, "auto"):
            what = f"computes in {info.dtype}, and bundle.dtype is {self.dtype}"
            raise self.mismatch(what, f"Start it with --dtype {self.dtype}")
        if info.dp_size != 1:
            raise self.mismatch(f"has dp_size={info.dp_size}: it cannot take over weights", "Start it with --dp-size 1")
        if self.settings.deterministic and not info.enable_deterministic_inference:
            raise self.mismatch(
                "ignores seeds, so that the run is not reproducible (or set rollout.deterministic=false)",
                "Start it with --enable-deterministic-inference",
            )
        if has_lora and not info.enable_lora:
            raise self.mismatch(
                "cannot load adapters", "Start it with --enable-lora with --max-lora-rank and --lora-target-modules"
            )

    def restore(self) -> bool:
        self.is_updating, self.adapter = False, None
        return super().restore()

    # Responses

    def complete(self, request: TokenRequest, params: ARSamplingParams) -> TokenAnswer:
        row = self._generate(request.id, request.prompt, params, request.seed)
        logps = [float("nan") if logp is None else logp for logp, _, _ in row.meta_info.output_token_logprobs]
        return TokenAnswer(row.output_ids, logps, weights_of(row.meta_info))

    def _generate(
        self,
        id: str,
        prompt: PlainPrompt,
        params: ARSamplingParams,
        seed: int,
        scored: Sequence[int] | None = None,
    ) -> messages.Generated:
        """The checked answer to one request, in one attempt. See `TokenServer.complete`."""
        ends = self.pipeline.bundle.codec.ends
        sampling = messages.sampling_params(params, ends, seed if self.settings.deterministic else None)
        rid = f"{id}-{secrets.token_hex(4)}"  # the former attempt at this response may still be running
        try:
            reply = self.post("/generate", messages.generate(rid, prompt, sampling, self.adapter, scored))
        except RequestFailed:
            self._abort(rid)
            raise
        row = self.read(reply, messages.Generated)
        meta = row.meta_info
        if meta.finish_reason.type == "abort":
            raise RequestFailed(f"the server aborted {id}: {meta.finish_reason.message}")
        if meta.id != rid or (row.prompt_token_ids != prompt.expanded and not prompt.images):
            raise EngineError(f"{self.name} answered {id} with the response to another request, {meta.id}")
        if row.prompt_token_ids != prompt.expanded:
            raise EngineError(
                f"{self.name} reads the {len(prompt.images)} images in the prompt of {id} as another number of tokens: "
                f"the prompt has {len(row.prompt_token_ids)} tokens there, and {len(prompt.expanded)} here. It scales "
                "images to the bounds of the checkpoint: pipeline.min_pixels and pipeline.max_pixels must lie within "
                "them, and the server may not have --mm-process-config"
            )
        scored_tokens = [token for _, token, _ in meta.output_token_logprobs]
        if scored_tokens != row.output_ids or meta.completion_tokens != len(row.output_ids):
            raise EngineError(
                f"{self.name}: its answer to {id} counts {meta.completion_tokens} tokens, and has the tokens "
                f"{row.output_ids[:8]}... ({len(row.output_ids)}) with log-probs of {scored_tokens[:8]}... "
                f"({len(scored_tokens)})"
            )
        self.refuse_mixture(id, weights_of(meta))
        return row

    def _abort(self, rid: str) -> None:
        """Ask the server to drop a request whose answer will not be read. It may be gone, and then has none."""
        with suppress(RequestFailed, ServerBusy, EngineError):
            self.post("/abort_request", {"rid": rid}, timeout_s=PROBE_TIMEOUT_S)

    # Weights

    def interrupt(self, in_flight: InFlight) -> None:
        self.insist_on("/pause_generation", {"mode": PAUSES[in_flight]})

    def proceed(self) -> None:
        self.insist_on("/continue_generation", {})

    def begin_weights(self, name: str) -> None:
        self.weights_name, self.has_lost_weights = name, False
        self.adapter_tensors = {}
        self.sent = SentTensors(hashes_bytes=self._info.device == "cpu")
        if self._sends_adapter:
            return
        if self.is_updating:  # a transfer that was broken off
            self._change("/end_weight_update", {})
        try:
            self._change("/begin_weight_update", {"selector": "all"})
        except EngineError as error:
            raise SyncError(
                f"{error}. If a transfer is open already, another run uses this server, or was killed during one: give "
                "each run its own server, and restart this one"
            ) from error
        self.is_updating = True

    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        named = {self.wire[name]: tensor for name, tensor in tensors.items()}
        if self._sends_adapter:
            self.adapter_tensors |= copied(named)
            return
        for name, tensor in named.items():
            self.sent.add(name, tensor)
        body = messages.weights_from_tensors(named, self.weights_name, self._info.tp_size)
        self._change("/update_weights_from_tensor", body)

    def end_weights(self) -> None:
        if self._sends_adapter:
            self._replace_adapter()
        else:
            self._change("/end_weight_update", {})
            self.is_updating = False
            self.proof.check(self.sent, self.checksums())
        self.check_version(self.get("/model_info", messages.ModelInfo).weight_version)

    def _replace_adapter(self) -> None:
        """Load the adapter under the name of the weights, and unload the former one."""
        assert self.layout is not None and self.layout.adapter is not None, "prepare comes first"
        former, name = self.adapter, self.weights_name
        tp_size = self._info.tp_size
        self._change(
            "/load_lora_adapter_from_tensors",
            messages.adapter_from_tensors(self.adapter_tensors, name, self.layout.adapter, tp_size),
        )
        self.adapter, self.adapter_tensors = name, {}
        if former is not None:
            self._change("/unload_lora_adapter", {"lora_name": former})
        self._change("/update_weight_version", {"new_version": name, "abort_all_requests": False})

    @property
    def _sends_adapter(self) -> bool:
        return self.layout is not None and self.layout.payload == "adapter"

    @property
    def _info(self) -> messages.ServerInfo:
        assert self.info is not None, "start comes first"
        return self.info

    def checksums(self) -> list[Mapping[str, str]]:
        reply = self.insist_on("/weights_checker", {"action": "checksum"})
        return [rank.checksums for rank in self.read(reply, messages.Checksums).ranks]

    def _change(self, path: str, body: messages.Body) -> None:
        """A request that changes the server. Raises SyncError if it reports that it failed."""
        outcome = self.read(self.insist_on(path, body), messages.Outcome)
        if not outcome.success:
            raise SyncError(f"{self.name}: {path} failed: {outcome.message or outcome.error_message}")

    # Checks of what it computes

    def gaps(self, prompts: Sequence[PlainPrompt], logits: Tensor) -> Tensor:
        pairs = itertools.product(zip(prompts, logits, strict=True), PROBE_TEMPERATURES)
        return torch.cat([self._gaps(prompt, row, temperature) for (prompt, row), temperature in pairs])

    def _gaps(self, prompt: PlainPrompt, logits: Tensor, temperature: float) -> Tensor:
        """Differences between the server's log-probs of the token after a prompt and those of `logits` [V]."""
        likely = logits.topk(min(PROBED_TOKENS, len(logits))).indices.tolist()
        params = ARSamplingParams(max_new_tokens=1, temperature=temperature)
        row = self.insist("to a probe", lambda: self._generate("probe", prompt, params, 0, likely))
        scores = [*(row.meta_info.output_token_ids_logprobs or [[]])[0], *row.meta_info.output_token_logprobs]
        if len(scores) != len(likely) + 1:
            raise EngineError(f"{self.name} was asked for {len(likely)} log-probs, and reports {len(scores) - 1}")
        tokens, theirs = [token for _, token, _ in scores], [logp for logp, _, _ in scores]
        return log_prob_gaps(logits / (temperature or 1.0), tokens, theirs)

    # Sleep

    def sleep(self) -> None:
        self.recover()
        if not (self._info.enable_memory_saver and self._info.enable_weights_cpu_backup):
            raise IncompatibleError(
                f"{self.name} cannot make room for the trainer, with which it shares devices: set "
                "rollout.enable_memory_saver=true (a server at rollout.url: --enable-memory-saver and "
                "--enable-weights-cpu-backup), or give it devices of its own with placement.rollout"
            )
        self.insist_on(f"/flush_cache?timeout={FLUSH_S}", {})  # it may not sleep while it answers
        self.release("/release_memory_occupation")

    def wake_up(self) -> None:
        self.recover()
        self.resume("/resume_memory_occupation")


def weights_of(meta: messages.Meta) -> list[str]:
    """The names of the weights that a response was sampled from, in the order of its tokens, without repetitions."""
    return list(dict.fromkeys([span.version for span in meta.weight_versions] or [meta.weight_version]))


def check_pause(in_flight: InFlight, sends_adapters: bool) -> None:
    """Raises IncompatibleError for requests that are to go on with another adapter than they name."""
    if in_flight == "pause" and sends_adapters:
        raise IncompatibleError(
            "rollout.in_flight=pause: a request names its adapter, so that it cannot go on with another one. Use drain "
            "or abort, or set sync.merge_adapters=true"
        )
