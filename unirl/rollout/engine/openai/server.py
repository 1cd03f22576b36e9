"""An OpenAI-compatible server of one language model: its command line, its requests, and the weights that it gets.

rollout.control=vllm    the endpoints that vLLM has with VLLM_SERVER_DEV_MODE=1: weights from a folder, sleep
rollout.control=none    the server keeps its weights, which must be those of the trainer; only this is verified
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.config.errors import EngineError, IncompatibleError, SyncError, did_you_mean
from unirl.config.http import RequestFailed
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.distributed.weight_sync.fingerprint import Fingerprint, PendingFingerprints
from unirl.models.language.pipeline import PlainPrompt, TextPipeline
from unirl.rollout.engine.openai import messages
from unirl.rollout.engine.openai.densities import HIGHEST_TEMPERATURE, TEMPERATURE, TOP_K, LogProbKind, checked_gaps
from unirl.rollout.engine.serving.checkpoint_server import CheckpointServer, CheckpointServerSettings, log_prob_gaps
from unirl.rollout.engine.serving.checksums import DIGITS, SentTensors
from unirl.rollout.engine.serving.payloads import copied
from unirl.rollout.engine.serving.process import LOOPBACK
from unirl.rollout.engine.serving.tokens import TokenAnswer, TokenRequest
from unirl.types.sampling import ARSamplingParams

EMPTY = hashlib.sha256(b"").hexdigest()[:DIGITS]
"""The checksum of a tensor that vLLM has packed into another form, as it does with linear layers on a CPU."""
PROBED_DRAWS = 8
"""Tokens that the probe draws after each prompt, to compare their log-probs with expected ones."""
SERVED_NAME = "trained"
"""The name of the model of a server that the engine starts."""
MODES: Mapping[LogProbKind, str] = {"raw": "raw_logprobs", "processed": "processed_logprobs"}
"""The values of vLLM's argument --logprobs-mode."""
Program = Literal["vllm", "fake"]
Control = Literal["vllm", "none"]


@dataclass(kw_only=True)
class OpenAISettings(CheckpointServerSettings):
    """Settings of an OpenAI-compatible server."""

    environment: ClassVar[str] = "vllm"

    program: Program = "vllm"
    """The server that is started: `vllm`, or `fake`, a small server of UniRL that speaks the same protocol, runs on a
    CPU without vllm, and is used at scale=toy."""
    control: Control = "vllm"
    """The endpoints of the server besides the OpenAI interface. vllm: those for weights and sleep that vLLM has with
    VLLM_SERVER_DEV_MODE=1; its server must see the folder of the run. none: the server has none, so it keeps its
    weights, which must be those of the trainer at the start, and its memory."""
    model: str | None = None
    """The name of the model in requests. Absent: that of the only model of the server."""
    logprobs: LogProbKind = "processed"
    """The distribution whose log-probs the server reports. raw: temperature 1, all tokens (llama.cpp, and the default
    of vLLM). tempered: the temperature of sampling, all tokens (SGLang). processed: the temperature of sampling, the
    tokens that top_k and top_p leave (vLLM as the engine starts it)."""
    gpu_memory_utilization: float | None = None
    """Share of the device memory for weights and the key-value cache. Absent: vLLM chooses."""


class OpenAIServer(CheckpointServer):
    """A process of `vllm serve`, or any OpenAI-compatible server that runs at `rollout.url`."""

    name: ClassVar[str] = "OpenAI-compatible server"
    health: ClassVar[str] = "/v1/models"
    own_arguments: ClassVar[Collection[str]] = (
        *("model", "served_model_name", "host", "port", "dtype", "tensor_parallel_size", "gpu_memory_utilization"),
        *("max_model_len", "logprobs_mode", "generation_config", "enable_sleep_mode"),
    )
    fake: ClassVar[str] = "openai"
    seeded: ClassVar[ARSamplingParams] = ARSamplingParams(max_new_tokens=16, temperature=HIGHEST_TEMPERATURE)
    keeps_seeds: ClassVar[str] = "Use a server that keeps them"
    settings: OpenAISettings

    def __init__(self, pipeline: TextPipeline[Any], folder: Path, log: Path, settings: OpenAISettings) -> None:
        """
        Args:
            folder: weights are written below it. The server must see it, too.
        """
        super().__init__(pipeline, folder, log, settings)
        self.model = SERVED_NAME
        """The name of the model in requests."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors of the transfer that is under way, by name."""
        self.prints = PendingFingerprints()
        self.verified: Mapping[str, Fingerprint] | None = None
        """With control=none: the trainer's weights with which the server's were compared."""
        self.label: str | None = None
        """The name that the server gives to its weights in answers. None: it gives none."""
        # A CPU has no device memory that could be freed.
        self.frees_memory = self._is_controlled and pipeline.bundle.device.type != "cpu"

    @property
    def _is_controlled(self) -> bool:
        return self.settings.control == "vllm"

    # The process

    def prepare(self, layout: WeightLayout) -> None:
        self.refuse_adapters(layout)
        if self._is_controlled:
            super().prepare(layout)

    def launch(self, python: str, port: int) -> list[str]:
        serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.root), "--host", LOOPBACK]
        return [*serve, "--port", str(port), "--dtype", self.dtype]

    def flags(self) -> list[str]:
        settings = self.settings
        flags = ["--served-model-name", SERVED_NAME, "--tensor-parallel-size", str(settings.tp_size)]
        # vLLM would take absent settings from the checkpoint, else.
        flags += ["--generation-config", "vllm", "--logprobs-mode", MODES[settings.logprobs]]
        if settings.gpu_memory_utilization is not None:
            flags += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        if settings.context_length is not None:
            flags += ["--max-model-len", str(settings.context_length)]
        return [*flags, "--enable-sleep-mode"] if self.frees_memory else flags

    def env(self) -> Mapping[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **super().env()}

    def check_ready(self) -> None:
        self.model = self._chosen_model()
        if self._is_controlled and self.http.request("GET", "/weight_info").status != 200:
            raise self.mismatch(
                "has no endpoint for weights (/weight_info)",
                "Start vLLM 0.32 or newer with the "
                "environment variable VLLM_SERVER_DEV_MODE=1, or set rollout.control=none to sample from the weights "
                "that the server has",
            )
        self._check_tokens()

    def _chosen_model(self) -> str:
        """The name of the model. Raises IncompatibleError for one that the server has not, or of another size."""
        cards = {card.id: card for card in self.get("/v1/models", messages.ModelList).data}
        wanted, names = self.settings.model, ", ".join(cards)
        if wanted is None and len(cards) != 1:
            raise IncompatibleError(f"{self._place} has {len(cards)} models: {names}. Set rollout.model to one of them")
        if wanted is not None and wanted not in cards:
            raise IncompatibleError(
                f"rollout.model={wanted}: {self._place} has no such model.{did_you_mean(wanted, cards)} It has {names}"
            )
        card = cards[wanted] if wanted is not None else next(iter(cards.values()))
        ours, theirs = self.pipeline.facts.vocab_size, None if card.meta is None else card.meta.n_vocab
        if theirs is not None and theirs != ours:
            raise IncompatibleError(
                f"{self._place} has a model of {theirs} tokens ({card.id}), and "
                f"bundle.path={self.pipeline.bundle.path} has {ours}: its tokens are others. Serve that model"
            )
        return card.id

    def _check_tokens(self) -> None:
        """Raises IncompatibleError unless the server takes prompts of tokens, and answers with tokens and log-probs."""
        prompt = list(self.pipeline.bundle.codec.ends[:1])
        others = "vLLM, SGLang and llama.cpp's server can do it; for transformers serve use rollout=server"
        try:
            first = "a first request"
            [choice] = self.insist(f"to {first}", lambda: self._completed(first, prompt, self.seeded, 0)).choices
        except EngineError as error:
            raise IncompatibleError(
                f"{error}. This was the first request to {self._place}, whose prompt is of token ids. {others}"
            ) from error
        if messages.tokens_of(choice) is None:
            raise IncompatibleError(
                f"{self._place} answers with texts alone (it ignores return_token_ids), and a text that is tokenized "
                f"again may give other tokens. {others}"
            )
        if messages.logps_of(choice) is None:
            raise IncompatibleError(f"{self._place} reports no log-probs (it ignores logprobs). {others}")

    @property
    def _place(self) -> str:
        url = self.settings.url
        return f"the {self.name} {'that was started' if url is None else f'at rollout.url={url}'}"

    # Responses

    def complete(self, request: TokenRequest, params: ARSamplingParams) -> TokenAnswer:
        completion = self._completed(request.id, request.prompt.tokens, params, request.seed)
        [choice] = completion.choices
        label = self._label(request.id, completion)
        weights = self.weights_name if label == self.label else str(label)
        return TokenAnswer(messages.tokens_of(choice) or [], messages.logps_of(choice), [weights])

    def _completed(
        self, id: str, prompt: Sequence[int], params: ARSamplingParams, seed: int
    ) -> messages.ScoredCompletion:
        """The checked answer to one request, in one attempt. See `TokenServer.complete`."""
        ends = self.pipeline.bundle.codec.ends
        body = messages.completion(self.model, prompt, params, ends, seed)
        completion = self.read(self.post("/v1/completions", body), messages.ScoredCompletion)
        name = f"{self.name}: its answer to {id}"
        if len(completion.choices) != 1:
            raise EngineError(f"{name} has {len(completion.choices)} responses, and one was asked for")
        if completion.model != self.model:
            raise EngineError(f"{name} is from the model {completion.model!r}, and {self.model!r} was asked")
        [choice] = completion.choices
        if choice.finish_reason not in ("stop", "length"):
            raise RequestFailed(f"the server ended {id} by {choice.finish_reason!r}")
        echoed = choice.prompt_token_ids
        if completion.usage.prompt_tokens != len(prompt) or (echoed is not None and echoed != list(prompt)):
            raise EngineError(
                f"{name} is to another prompt: {echoed or ''} of {completion.usage.prompt_tokens} tokens, not "
                f"{list(prompt)[:8]}... of {len(prompt)}"
            )
        tokens = messages.tokens_of(choice)
        if tokens is not None and completion.usage.completion_tokens != len(tokens):
            raise EngineError(
                f"{name} counts {completion.usage.completion_tokens} tokens, and has {len(tokens)}: {tokens[:8]}"
            )
        return completion

    def _label(self, id: str, completion: messages.ScoredCompletion) -> str | None:
        """The name of the weights of an answer. None: the server has no names. Raises SyncError for several names.

        vLLM before 0.33 does not write it into answers, so it is asked for the present name.
        """
        [choice] = completion.choices
        labels = {span.version for span in choice.weight_versions or ()}
        if completion.metadata is not None and completion.metadata.weight_version is not None:
            labels.add(completion.metadata.weight_version)
        self.refuse_mixture(id, sorted(labels))
        if not labels and self._is_controlled:
            return self.get("/weight_info", messages.WeightInfo).weight_version
        return next(iter(labels), None)

    # Weights

    def begin_weights(self, name: str) -> None:
        self.weights_name, self.has_lost_weights = name, False
        self.sent, self.tensors, self.prints = SentTensors(hashes_bytes=True), {}, PendingFingerprints()

    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._is_controlled:
                self.sent.add(self.wire[name], tensor)
            else:
                self.prints.add(name, tensor)
        if self._is_controlled:
            self.tensors |= copied(tensors)

    def end_weights(self) -> None:
        if self._is_controlled:
            self._load()
            self.label = self.weights_name
            self.proof.check(self.sent, self.checksums())
            return
        prints = self.prints.result()
        if self.verified is not None and prints != self.verified:
            raise SyncError(
                f"the trained weights have changed, and {self._place} has no endpoint for weights "
                "(rollout.control=none): it samples from those of the start. Use a vLLM server (rollout.control=vllm) "
                "or rollout=sglang, or raise weight_sync_interval to num_rollouts, to sample from the start alone"
            )
        self.verified = prints
        prompt = list(self.pipeline.bundle.codec.ends[:1])
        answer = self.insist("to a probe", lambda: self._completed("probe", prompt, self.seeded, 0))
        self.label = self._label("probe", answer)

    def _load(self) -> None:
        """Write a checkpoint with the tensors, and make every worker of the server read it."""
        folder = self.folder / self.weights_name
        self.pipeline.write_model(self.tensors, folder)
        self.tensors = {}
        self.insist_on("/collective_rpc", messages.reload_weights(str(folder)))
        self.insist_on("/reset_prefix_cache", {})
        self.insist_on("/update_weight_version", {"new_version": self.weights_name})
        shutil.rmtree(folder)
        self.check_version(self.get("/weight_info", messages.WeightInfo).weight_version)

    def checksums(self) -> list[Mapping[str, str]]:
        reply = self.read(self.insist_on("/weight_checker", {"action": "checksum"}), messages.WeightDigests)
        ranks: dict[str, dict[str, str]] = {}
        for key, digest in reply.checksums.items():
            rank, _, name = key.rpartition(":")
            if digest[:DIGITS] != EMPTY:
                ranks.setdefault(rank, {})[name] = digest[:DIGITS]
        return list(ranks.values())

    # Checks of what it computes

    def gaps(self, prompts: Sequence[PlainPrompt], logits: Tensor) -> Tensor:
        """Compares log-probs of drawn tokens, and recognises their distribution."""
        gaps = []
        for prompt, row in zip(prompts, logits, strict=True):
            tokens, logps = zip(*self._drawn(prompt.tokens, ARSamplingParams(max_new_tokens=1)), strict=True)
            gaps.append(log_prob_gaps(row, tokens, logps))
        truncated = ARSamplingParams(max_new_tokens=1, temperature=TEMPERATURE, top_k=TOP_K)
        drawn = self._drawn(prompts[0].tokens, truncated)
        return torch.cat([*gaps, checked_gaps(self.name, self.settings.logprobs, logits[0], drawn)])

    @property
    def causes(self) -> str:
        reported = f"its log-probs are not those of rollout.logprobs={self.settings.logprobs}"
        temperature = "or it samples at another temperature than it is asked for"
        if self._is_controlled:
            return f"{self._place} loaded another base checkpoint, {reported}, {temperature}"
        return (
            f"{self._place} has other weights, which it keeps (rollout.control=none): serve the folder that `unirl "
            f"export RUN` writes; {reported}; {temperature}"
        )

    def _drawn(self, prompt: Sequence[int], params: ARSamplingParams) -> list[tuple[int, float]]:
        """The first tokens that the server draws after a prompt with several seeds, and their log-probs."""
        return [self._drawn_once(prompt, params, seed) for seed in range(PROBED_DRAWS)]

    def _drawn_once(self, prompt: Sequence[int], params: ARSamplingParams, seed: int) -> tuple[int, float]:
        [choice] = self.insist("to a probe", lambda: self._completed("probe", prompt, params, seed)).choices
        tokens, logps = messages.tokens_of(choice), messages.logps_of(choice)
        if not tokens or logps is None or len(tokens) != len(logps):
            raise EngineError(f"{self.name}: its answer to a probe has the tokens {tokens} and the log-probs {logps}")
        return tokens[0], logps[0]

    # Sleep

    def sleep(self) -> None:
        self.recover()
        if self.frees_memory:
            self.release("/sleep?level=1")

    def wake_up(self) -> None:
        self.recover()
        if self.frees_memory:
            self.resume("/wake_up")
