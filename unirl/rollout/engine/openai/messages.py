"""The messages of OpenAI-compatible servers: the bodies of requests, and the parts of answers that are read.

One body of /v1/completions suits vLLM, SGLang and llama.cpp's server, which leave out the fields that they do not know.
The other paths are those of vLLM (0.33.0) with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unirl.rollout.engine.sglang_llm.messages import VersionSpan
from unirl.types.sampling import ARSamplingParams

Body = dict[str, object]


# Answers


class ModelMeta(msgspec.Struct):
    """Facts about a model, as llama.cpp's server gives them."""

    n_vocab: int | None = None


class ServedModelCard(msgspec.Struct):
    """One model of a server."""

    id: str
    meta: ModelMeta | None = None


class ModelList(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[ServedModelCard]


class TokenScore(msgspec.Struct):
    """A token with its log-prob. One without a finite log-prob has null."""

    id: int
    logprob: float | None = None


class LogProbs(msgspec.Struct):
    """The log-probs of a response: two forms, of which a server uses one."""

    token_logprobs: list[float | None] | None = None
    content: list[TokenScore] | None = None


class ScoredChoice(msgspec.Struct):
    """One response. The fields with a default are extensions of the OpenAI interface."""

    finish_reason: str | None
    logprobs: LogProbs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int


class Metadata(msgspec.Struct):
    """Facts about a response, as SGLang gives them."""

    weight_version: str | None = None


class ScoredCompletion(msgspec.Struct):
    """The answer of /v1/completions."""

    model: str
    choices: list[ScoredChoice]
    usage: Usage
    metadata: Metadata | None = None


class WeightInfo(msgspec.Struct):
    """The answer of /weight_info."""

    weight_version: str


class WeightDigests(msgspec.Struct):
    """The answer of /weight_checker: SHA-256 of every tensor, by `RANK:NAME`."""

    checksums: dict[str, str]


def tokens_of(choice: ScoredChoice) -> list[int] | None:
    """The tokens of a response. None if the server gives their texts alone."""
    if choice.token_ids is not None:
        return choice.token_ids
    scored = None if choice.logprobs is None else choice.logprobs.content
    return None if scored is None else [each.id for each in scored]


def logps_of(choice: ScoredChoice) -> list[float] | None:
    """The log-prob of each token, nats; NaN for one that is not finite. None if the server gives none."""
    given = choice.logprobs
    if given is None or (given.token_logprobs is None and given.content is None):
        return None
    values = given.token_logprobs
    if values is None:
        values = [each.logprob for each in given.content or ()]
    return [float("nan") if value is None else value for value in values]


# Requests


def completion(model: str, prompt: Sequence[int], params: ARSamplingParams, ends: Sequence[int], seed: int) -> Body:
    """The body of /v1/completions for one prompt. Stop strings are left out: the engine cuts responses itself.

    All settings are written out, because a server takes those that are absent from the checkpoint.

    Args:
        ends: the tokens that end a response.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "stop_token_ids": list(ends),
        "skip_special_tokens": False,
        "logprobs": 1,
        "return_token_ids": True,
        "return_weight_versions": True,
    }


def reload_weights(folder: str) -> Body:
    """The body of /collective_rpc that makes every worker of vLLM read the weights in a folder."""
    return {"method": "reload_weights", "kwargs": {"weights_path": folder}}
