"""Samples with `transformers serve`, the OpenAI-compatible server of the transformers library. It runs on a CPU, too.

The server reads and writes texts, and a text that is tokenized again need not give the same tokens. So each folder of
weights that it loads has a tokenizer in which the text of token 17 is "17" and blanks separate tokens: prompts and
responses are exact tokens. It reports no log-probs, so the trainer replays them. New weights are a new folder, whose
name it repeats in every answer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import EngineError
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.distributed.weight_sync.fingerprint import Fingerprint, fingerprints
from unirl.models.language.bundle import load_network
from unirl.models.language.pipeline import PlainPrompt, TextPipeline
from unirl.models.loading.hub import quiet_libraries
from unirl.rollout.engine.serving.http_server import HttpServer, shown
from unirl.rollout.engine.serving.process import LOOPBACK
from unirl.rollout.engine.serving.settings import ServerSettings
from unirl.rollout.engine.serving.tokens import ProbeResult, TokenAnswer, TokenRequest, TokenServer, TokenServingEngine
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams

NEEDED = ("fastapi", "uvicorn", "openai")
PROBED_RANKS = (1, 2, 4, 9, 32)
"""Tokens that the probe compares with the most likely one, by their rank in the expected logits."""
PROBE_LADDER = (1e-5, 1e-4, 1e-3, 1e-2, 5e-2, 0.25)
"""Relative differences that the probe tells apart."""


class ServedChoice(msgspec.Struct):
    """The part of a choice that is read."""

    text: str
    finish_reason: str


class ServedCompletion(msgspec.Struct):
    """The part of a response of /v1/completions that is read."""

    model: str
    choices: list[ServedChoice]


class TransformersServer(TokenServer):
    """A process of `transformers serve`, or one that runs at `rollout.url` on this machine."""

    name: ClassVar[str] = "transformers serve"
    health: ClassVar[str] = "/health"
    # It generates one response at a time, and a seed is for the whole process.
    concurrency = 1

    pipeline: TextPipeline[Any]

    def __init__(self, pipeline: TextPipeline[Any], folder: Path, log: Path, settings: ServerSettings) -> None:
        """
        Args:
            folder: weights are written below it. The server must see it, too.
        """
        super().__init__(pipeline, folder, log, settings)
        shutil.rmtree(folder, ignore_errors=True)  # weights of a run that was killed
        self.model: Path | None = None
        """The folder of the weights that the server has."""
        self.sent: dict[str, Tensor] = {}
        """The tensors of the transfer that is under way, by name."""

    def words(self, python: str, port: int) -> list[str]:
        options = {"--host": LOOPBACK, "--port": str(port), "--device": str(self.pipeline.bundle.device)}
        # A model stays loaded until the next one takes its place.
        options |= {"--model-timeout": str(10**9), "--log-level": "error"}
        serve = [python, "-m", "transformers.cli.transformers", "serve"]
        return serve + [word for option in options.items() for word in option]

    def check_ready(self) -> None:
        """It takes its settings with every request."""

    def prepare(self, layout: WeightLayout) -> None:
        self.refuse_adapters(layout)

    def restore(self) -> bool:
        self._load()
        return True

    def complete(self, request: TokenRequest, params: ARSamplingParams) -> TokenAnswer:
        ends = self.pipeline.bundle.codec.ends
        settings = {
            "do_sample": params.temperature > 0,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "max_new_tokens": params.max_new_tokens,
            "min_new_tokens": params.min_new_tokens,
            "eos_token_id": list(ends),
            "pad_token_id": ends[0],
        }
        if params.temperature > 0:
            settings["temperature"] = params.temperature
        return self._generate(request.prompt.tokens, settings, request.seed)

    def _generate(self, prompt: Sequence[int], settings: Mapping[str, object], seed: int) -> TokenAnswer:
        body = {
            "model": str(self.model),
            "prompt": text_of(prompt),
            "seed": seed,
            "generation_config": json.dumps(settings),
        }
        reply = self.post("/v1/completions", body)
        try:
            completion = msgspec.json.decode(reply.body, type=ServedCompletion)
            [choice] = completion.choices
            tokens = [int(word) for word in choice.text.split()]
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineError(f"{self.name}: an answer cannot be read: {error}: {shown(reply)}") from error
        return TokenAnswer(tokens, None, [Path(completion.model).name])

    def begin_weights(self, name: str) -> None:
        self.sent, self.weights_name = {}, name

    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.sent |= {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def end_weights(self) -> Mapping[str, Fingerprint]:
        old, folder, tensors = self.model, self.folder / self.weights_name, self.sent
        with quiet_libraries():
            self.pipeline.write_model(tensors, folder)
            id_tokenizer(self.pipeline.facts.vocab_size).save_pretrained(folder)
        self.model = folder
        self.wake_up()
        if old is not None:
            shutil.rmtree(old)
        bundle = self.pipeline.bundle
        with quiet_libraries():
            network = load_network(bundle.family.network_class(), folder, bundle.dtype)
        held = dict(network.named_parameters(remove_duplicate=False))
        self.sent = {}
        return fingerprints((name, held[name]) for name in tensors)

    def probe(self, prompts: Sequence[PlainPrompt], logits: Tensor) -> ProbeResult:
        """Compares logits through the choice of the most likely token.

        l_m is the largest logit, l_t that of another token t. With a bias b on t the server chooses m if
        b < l_m - l_t, and t if b > l_m - l_t. Asking at l_m - l_t -+ d bounds the error of the difference by d.
        """
        scale = float(logits.double().square().mean().sqrt())
        for step in PROBE_LADDER:
            if all(self._agrees(prompt.tokens, row, step * scale) for prompt, row in zip(prompts, logits, strict=True)):
                return ProbeResult(step * scale, step)
        return ProbeResult(float("inf"), float("inf"))

    def _agrees(self, prompt: Sequence[int], logits: Tensor, margin: float) -> bool:
        values, tokens = logits.double().sort(descending=True, stable=True)
        ranks = [rank for rank in PROBED_RANKS if rank < len(tokens)]
        gaps = [(int(tokens[rank]), float(values[0] - values[rank])) for rank in ranks]
        return all(
            self._chooses(prompt, logits, token, gap + side, margin)
            for token, gap in gaps
            for side in (-margin, margin)
        )

    def _chooses(self, prompt: Sequence[int], logits: Tensor, token: int, bias: float, margin: float) -> bool:
        """True if the server's choice, with a bias on one token, is the best one by `logits`, or as good."""
        biased = logits.double().clone()
        biased[token] += bias
        return float(biased.max() - biased[self._greedy(prompt, token, bias)]) < margin / 2

    def _greedy(self, prompt: Sequence[int], token: int, bias: float) -> int:
        """The most likely token after a prompt, with a bias on one token's logit."""
        settings = {"do_sample": False, "max_new_tokens": 1, "sequence_bias": [[[token], bias]]}
        settings["pad_token_id"] = self.pipeline.bundle.codec.ends[0]
        return int(self._generate(prompt, settings, 0).tokens[0])

    def sleep(self) -> None:
        self.insist_on("/reset", {})

    def wake_up(self) -> None:
        self.insist("to wake up", self._load)

    def _load(self) -> None:
        if self.model is None:
            return
        self.post("/reset", {})
        reply = self.post("/load_model", {"model": str(self.model)})
        if b'"ready"' not in reply.body:
            raise EngineError(f"{self.name} could not load {self.model}: {shown(reply)}")


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens in the tokenizer of `id_tokenizer`."""
    return " ".join(map(str, tokens))


def id_tokenizer(vocab_size: int) -> Any:
    """A tokenizer whose texts are token ids, separated by blanks. No token is special, so that none is left out."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(vocab_size)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@dataclass(kw_only=True, eq=False, repr=False)
class TransformersServeEngine(TokenServingEngine):
    """Samples with `transformers serve`. A server at `rollout.url` must run on this machine."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        snapshots=True, dedicated=True, remote=True, modalities=("text",)
    )
    server_class: ClassVar[type[HttpServer]] = TransformersServer
    files: ClassVar[str] = "transformers-serve"

    start_timeout_s: float = 300.0
    timeout_s: float = 600.0

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        if settings["url"] is None and settings["python_executable"] is None:
            for package in NEEDED:
                need(package, by=cls.__name__, extra="serve")
