"""Samples tokens with a server: encodes prompts, sends requests, checks every answer, and sends weights.

prompts --encode--> token ids --TokenServer.complete--> token ids --checks--> segment
buckets --WeightForwarder--> TokenServer.send_weights --> fingerprints --> probe of the logits
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import Any

from unirl.config.errors import EngineError, IncompatibleError, SyncError, WeightsLostError
from unirl.distributed.weight_sync.base import Arrival, CanaryResult, Numerics, ParamMapping, WeightLayout
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.endpoints import WeightForwarder
from unirl.models.base import CanaryOutput, response_of
from unirl.models.language.decoding import Response, ResponseBuilder
from unirl.models.language.packing import prompts_of
from unirl.models.language.pipeline import TextPipeline
from unirl.models.language.stage import text_segment
from unirl.models.loading.lora import adapter_names, inject_lora
from unirl.rollout.engine.base import DedicatedEngine
from unirl.rollout.engine.serving.server import TokenAnswer, TokenRequest, TokenServer
from unirl.sde.noise import NoiseSource, key_seed
from unirl.types.batch import Batch
from unirl.types.conditions import PromptTokens
from unirl.types.facts import ModelFacts
from unirl.types.progress import progress
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ARSamplingParams

SEEDS = 2**31
"""Servers take seeds of 31 bits."""


class TokenServingEngine(DedicatedEngine):
    """Samples with a server of tokens. The pipeline encodes and decodes; its network has no storage.

    Responses depend on their own seeds, not on other rows. They are not those of the trainside engine, whose random
    numbers a server does not use: the distribution is the same.
    """

    def __init__(self, pipeline: TextPipeline[Any], server: TokenServer) -> None:
        if pipeline.facts.condition_images != (0, 0):
            raise IncompatibleError(
                f"{type(self).__name__} sends texts alone, and {type(pipeline).__name__} is for a model that reads "
                "images. Use another engine, such as rollout=replica"
            )
        self.pipeline = pipeline
        self.server = server
        self.forwarder: WeightForwarder | None = None
        self.owner = secrets.token_hex(4)
        """Part of the names of weights. It tells this engine from another one that uses the same server."""
        self.num_transfers = 0
        self.weights_name = ""
        """The name under which the server has the weights of the last transfer."""

    def facts(self) -> ModelFacts:
        return self.pipeline.facts

    # Weights

    def prepare(self, layout: WeightLayout) -> ParamMapping:
        self.held = None
        network = self.pipeline.bundle.trainable()
        if layout.adapter is not None and not adapter_names(network):
            inject_lora(network, layout.adapter, seed=0)
        self.server.prepare(layout)
        self.server.start()
        self.forwarder = WeightForwarder(network, layout)
        computing = Numerics.of(network, self.pipeline.stage.autocast_dtype, self.pipeline.bundle.device)
        numerics = Numerics(f"{self.server.name}", 0, computing.compute, computing.storage)
        return ParamMapping(self.forwarder.dtypes(), numerics)

    def take(self, bucket: Bucket) -> None:
        tensors = self._bound().checked(bucket)
        if bucket.number == 0:
            self.num_transfers += 1
            self.weights_name = f"{self.num_transfers:06d}-{bucket.weights}-{bucket.version}-{self.owner}"
            self.server.begin_weights(self.weights_name)
        self.server.send_weights(tensors)

    def arrival(self) -> Arrival:
        """Let the server sample from the weights of the transfer, and report what it has now."""
        return self._bound().arrival_of(self.server.end_weights())

    def _bound(self) -> WeightForwarder:
        if self.forwarder is None:
            raise SyncError("weights arrived before prepare(layout) was called")
        return self.forwarder

    def canary_inputs(self) -> PromptTokens:
        return self.pipeline.canary_inputs()

    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        prompts = prompts_of({"prompt": inputs})
        rows = [row.tolist() for row in prompts.tokens.split(prompts.lengths.tolist())]
        result = self.server.probe(rows, answer.values.float().cpu())
        return CanaryResult(False, result.absdiff, result.relative)

    def move(self, asleep: bool) -> None:
        try:
            (self.server.sleep if asleep else self.server.wake_up)()
        except WeightsLostError:
            self.held = None  # the next `EngineSync.push` sends them again

    # Samples

    def sample(self, req: RolloutReq) -> RolloutResp:
        _, params = req.only_track(ARSamplingParams)
        conditions = self.pipeline.encode(req, params)
        prompts = prompts_of(conditions)
        tokens = [row.tolist() for row in prompts.tokens.cpu().split(prompts.lengths.tolist())]
        noise = NoiseSource(params.seed, req.purpose, req.step)
        seeds = [key_seed(params.seed, noise.key(id, "tok")) % SEEDS for id in req.sample_ids]
        requests = [TokenRequest(*row) for row in zip(req.sample_ids, tokens, seeds, strict=True)]
        try:
            answers = self._answers(requests, params)
        except WeightsLostError:
            self.held = None
            raise
        builder = ResponseBuilder(self.pipeline.bundle.codec, params, None)
        responses = [response_from(row, id, answers[row], builder) for row, id in enumerate(req.sample_ids)]
        segment = text_segment(responses, params)
        return response_of(req, conditions, segment, self.pipeline.decoded(segment, req.sample_ids))

    def _answers(self, requests: Sequence[TokenRequest], params: ARSamplingParams) -> list[TokenAnswer]:
        """The checked answers to all requests, in their order."""
        answers: dict[int, TokenAnswer] = {}
        with ThreadPoolExecutor(self.server.concurrency, thread_name_prefix="server") as threads:
            started = {
                threads.submit(copy_context().run, self._answer, request, params): row
                for row, request in enumerate(requests)
            }
            try:
                for future in as_completed(started):
                    answers[started[future]] = future.result()
                    progress("sample", len(requests), len(answers))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [answers[row] for row in range(len(requests))]

    def _answer(self, request: TokenRequest, params: ARSamplingParams) -> TokenAnswer:
        """The checked answer to one request, after retries. A retried request has the same seed."""
        answer = self.server.insist(f"for {request.id}", lambda: self.server.complete(request, params))
        self._check(request, answer, params)
        return answer

    def _check(self, request: TokenRequest, answer: TokenAnswer, params: ARSamplingParams) -> None:
        """Raises SyncError or EngineError for an answer that the server may not give."""
        if answer.weights != self.weights_name:
            self.server.recover()  # raises if the server was restarted, which explains it
            raise SyncError(
                f"{self.server.name} sampled {request.id} from the weights {answer.weights!r}, and the last verified "
                f"ones are {self.weights_name!r}: another program may have loaded weights into the same server"
            )
        name, count = f"{self.server.name}: its answer to {request.id}", len(answer.tokens)
        if not 1 <= count <= params.max_new_tokens:
            raise EngineError(f"{name} has {count} tokens, and sampling.max_new_tokens is {params.max_new_tokens}")
        wrong = [token for token in answer.tokens if not 0 <= token < self.pipeline.facts.vocab_size]
        if wrong:
            raise EngineError(f"{name} has the token {wrong[0]}; the model has {self.pipeline.facts.vocab_size} tokens")
        if self.capabilities.behaviour_logp:
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
