"""Samples tokens with a server: encodes prompts, sends requests, and checks every answer.

prompts --encode--> token ids --TokenServer.complete--> token ids --checks--> segment
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from unirl.config.errors import EngineError, IncompatibleError, SyncError
from unirl.distributed.weight_sync.base import CanaryResult, WeightLayout
from unirl.models.base import CanaryOutput, response_of
from unirl.models.language.decoding import Response, ResponseBuilder
from unirl.models.language.pipeline import PlainPrompt, TextPipeline
from unirl.models.language.stage import text_segment
from unirl.rollout.engine.serving.engine import ServingEngine, seeds_of
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.types.batch import Batch
from unirl.types.conditions import PromptTokens
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as


@dataclass(frozen=True)
class TokenRequest:
    """One response to be sampled."""

    id: str
    prompt: PlainPrompt
    seed: int
    """The seed of its random numbers, in [0, 2^31)."""


@dataclass(frozen=True)
class TokenAnswer:
    """One sampled response, as the server reports it."""

    tokens: Sequence[int]
    logps: Sequence[float] | None
    """Log-prob of each token, nats: log_softmax(logits / temperature) before top_k and top_p. None: not reported."""
    weights: Sequence[str]
    """The names of the weights that its tokens were sampled from, as the server reports them, in order."""


@dataclass(frozen=True)
class ProbeResult:
    """The difference between the server's logits and expected ones, on a fixed input."""

    absdiff: float
    """The largest absolute difference, nats, or a bound on it; inf if there is no bound."""
    relative: float
    """The root mean square of the difference, or a bound on it, divided by that of the expected logits."""
    causes: str = (
        "the server loaded another base checkpoint, an adapter is inactive, a second adapter acts, or it computes, or "
        "reports log-probs, at another temperature than it is asked for"
    )
    """What a difference may come from, and what to do then."""


class TokenServer(HttpServer):
    """A server that samples tokens."""

    reads_images: ClassVar[bool] = False
    """It takes prompts with images."""

    @abstractmethod
    def complete(self, request: TokenRequest, params: ARSamplingParams) -> TokenAnswer:
        """Sample one response, in one attempt.

        Raises:
            RequestFailed, ServerBusy: another attempt may succeed.
            EngineError: the server refuses the request, or its answer cannot be read.
        """

    @abstractmethod
    def probe(self, prompts: Sequence[PlainPrompt], logits: Tensor) -> ProbeResult:
        """Compare the server's logits after each prompt with `logits` [B, V]."""

    def refuse_adapters(self, layout: WeightLayout) -> None:
        """Raises SyncError for a transfer of adapters. For servers that cannot load them while they run."""
        if layout.payload == "adapter":
            raise SyncError(
                f"{self.name} cannot load adapters while it runs: set sync.merge_adapters=true, which merges them into "
                "the weights that are sent"
            )


class TokenServingEngine(ServingEngine):
    """Samples with a server of tokens. The pipeline encodes and decodes; its network has no storage.

    Responses depend on their own seeds, not on other rows. They are not those of the trainside engine, whose random
    numbers a server does not use: the distribution is the same.
    """

    pipeline: TextPipeline[Any]
    server: TokenServer

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline.facts.condition_images != (0, 0) and not self.server.reads_images:
            raise IncompatibleError(
                f"{type(self).__name__} sends texts alone, and {type(self.pipeline).__name__} is for a model that "
                "reads images. Use another engine, such as rollout=sglang or rollout=replica"
            )

    @classmethod
    def check_settings(cls, sampling: Sampling, settings: Mapping[str, object]) -> None:
        super().check_settings(sampling, settings)
        cls._check_length(sampling_as(ARSamplingParams, sampling, f"{cls.server_class.name} samples with"))

    @classmethod
    def _check_length(cls, params: ARSamplingParams) -> None:
        """Raises IncompatibleError for a smallest length where log-probs are those of the server."""
        if params.min_new_tokens > 0 and cls.capabilities.old_logp == "native":
            raise IncompatibleError(
                f"sampling.min_new_tokens={params.min_new_tokens}: {cls.server_class.name} would report log-probs "
                "without the end tokens, which are those of another policy than the trained one. Set "
                "sampling.min_new_tokens=0"
            )

    def canary_inputs(self) -> PromptTokens:
        return self.pipeline.canary_inputs()

    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        prompts = self.pipeline.plain_prompts({"prompt": inputs})
        result = self.server.probe(prompts, answer.values.float().cpu())
        return CanaryResult(False, result.absdiff, result.relative, result.causes)

    def respond(self, req: RolloutReq) -> RolloutResp:
        _, params = req.only_track(ARSamplingParams)
        self._check_length(params)
        conditions = self.pipeline.encode(req, params)
        prompts = self.pipeline.plain_prompts(conditions)
        rows = zip(req.sample_ids, prompts, seeds_of(req, params, "tok"), strict=True)
        answers = self.answers([TokenRequest(*row) for row in rows], partial(self._answer, params))
        builder = ResponseBuilder(self.pipeline.bundle.codec, params, None)
        responses = [response_from(row, id, answers[row], builder) for row, id in enumerate(req.sample_ids)]
        segment = text_segment(responses, params)
        resp = response_of(req, conditions, segment, self.pipeline.decoded(segment, req.sample_ids))
        return self.with_versions(resp, [answer.weights[0] for answer in answers])

    def _answer(self, params: ARSamplingParams, request: TokenRequest) -> TokenAnswer:
        """The checked answer to one request, after retries. A retried request has the same seed."""
        answer, names = self.ask(request.id, lambda: self.server.complete(request, params))
        for weights in answer.weights:
            self.check_weights(request.id, weights, names)
        self._check(request, answer, params)
        return answer

    def _check(self, request: TokenRequest, answer: TokenAnswer, params: ARSamplingParams) -> None:
        """Raises EngineError for an answer that the server may not give."""
        name, count = f"{self.server.name}: its answer to {request.id}", len(answer.tokens)
        if not 1 <= count <= params.max_new_tokens:
            raise EngineError(f"{name} has {count} tokens, and sampling.max_new_tokens is {params.max_new_tokens}")
        wrong = [token for token in answer.tokens if not 0 <= token < self.pipeline.facts.vocab_size]
        if wrong:
            raise EngineError(f"{name} has the token {wrong[0]}; the model has {self.pipeline.facts.vocab_size} tokens")
        if self.capabilities.old_logp == "native":
            logps = [] if answer.logps is None else answer.logps
            if len(logps) != count or not all(math.isfinite(logp) and logp <= 0 for logp in logps):
                raise EngineError(f"{name} has {count} tokens, and needs as many log-probs <= 0: {list(logps)[:8]}")


def response_from(row: int, id: str, answer: TokenAnswer, builder: ResponseBuilder) -> Response:
    """The response of a row, ended as the sampling settings say. Log-probs that the server does not report are NaN."""
    response = Response(row, id)
    logps = answer.logps if answer.logps is not None else [math.nan] * len(answer.tokens)
    for token, logp in zip(answer.tokens, logps, strict=True):
        builder.append(response, int(token), float(logp))
        if response.is_done:  # a stop string: the server does not know it
            return response
    raise EngineError(
        f"the server's answer to {id} ends after {len(answer.tokens)} of {builder.params.max_new_tokens} tokens, and "
        f"the last one, {answer.tokens[-1]}, is no end token of the model {list(builder.codec.ends)}: it was cut off"
    )
