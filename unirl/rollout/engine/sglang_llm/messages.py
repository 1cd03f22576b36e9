"""The messages of SGLang's HTTP interface (0.5.23): the bodies of requests, and the parts of answers that are read.

sglang itself is not imported: its packages belong to the environment of the server.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from torch import Tensor

from unirl.models.language.pipeline import PlainPrompt
from unirl.rollout.engine.serving.payloads import bytes_of, copied, pickled
from unirl.types.facts import LoraSpec
from unirl.types.sampling import ARSamplingParams

Body = dict[str, object]
PNG = "data:image/png;base64,"
"""The beginning of an image in a request."""


# Answers


class FinishReason(msgspec.Struct):
    """The end of a response: `stop`, `length` or `abort`."""

    type: str
    message: str | None = None


class VersionSpan(msgspec.Struct):
    """The tokens [start, end) that were sampled from the weights `version`."""

    version: str
    start: int
    end: int


ScoredToken = tuple[float | None, int, str | None]
"""Log-prob, token and, if it was asked for, text. The log-prob of a token without a finite one is null."""


class Meta(msgspec.Struct):
    """Facts about one response."""

    id: str
    finish_reason: FinishReason
    weight_version: str
    completion_tokens: int
    output_token_logprobs: list[ScoredToken]
    weight_versions: list[VersionSpan]
    output_token_ids_logprobs: list[list[ScoredToken]] | None = None


class Generated(msgspec.Struct):
    """The answer of /generate to one prompt."""

    output_ids: list[int]
    meta_info: Meta
    prompt_token_ids: list[int]


class Outcome(msgspec.Struct):
    """The answer of a request that changes the server. Those about adapters have `error_message`."""

    success: bool
    message: str = ""
    error_message: str = ""


class RankChecksums(msgspec.Struct):
    """Checksums of the tensors of one tensor-parallel rank, by name."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """The answer of /weights_checker."""

    success: bool
    message: str
    ranks: list[RankChecksums]


class ServerInfo(msgspec.Struct):
    """The settings of a server."""

    version: str
    device: str | None
    dtype: str
    tp_size: int
    dp_size: int
    enable_deterministic_inference: bool
    enable_lora: bool | None
    enable_memory_saver: bool
    enable_weights_cpu_backup: bool
    skip_tokenizer_init: bool


class ModelInfo(msgspec.Struct):
    """The model of a server."""

    model_path: str
    weight_version: str
    model_type: str | None = None


# Requests


def sampling_params(params: ARSamplingParams, ends: Sequence[int], seed: int | None) -> Body:
    """The settings of one response. Stop strings are left out: the engine cuts responses itself.

    Args:
        ends: the tokens that end a response.
        seed: absent for a server without deterministic inference, which ignores seeds.
    """
    body: Body = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop_token_ids": list(ends),
        "skip_special_tokens": False,
    }
    return body if seed is None else body | {"sampling_seed": seed}


def generate(
    rid: str, prompt: PlainPrompt, sampling: Body, adapter: str | None, scored: Sequence[int] | None = None
) -> Body:
    """The body of /generate for one prompt.

    Args:
        rid: the name of the request, under which it can be aborted.
        prompt: the server replaces each placeholder of an image by as many as the image has tokens.
        adapter: the name of the adapter to sample with.
        scored: tokens whose log-probs are reported at every position, in addition to the sampled ones.
    """
    body: Body = {
        "rid": rid,
        "input_ids": prompt.tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    if prompt.images:
        body["image_data"] = [PNG + base64.b64encode(image).decode() for image in prompt.images]
    if adapter is not None:
        body["lora_path"] = adapter
    return body if scored is None else body | {"token_ids_logprob": list(scored)}


def weights_from_tensors(tensors: Mapping[str, Tensor], name: str, tp_size: int) -> Body:
    """The body of /update_weights_from_tensor. Every tensor-parallel rank reads all tensors, and keeps its part.

    Args:
        name: the version that answers repeat.
    """
    return {
        "serialized_named_tensors": [pickled(list(copied(tensors).items()))] * tp_size,
        "load_format": None,
        "flush_cache": True,
        "weight_version": name,
    }


def adapter_from_tensors(tensors: Mapping[str, Tensor], name: str, spec: LoraSpec, tp_size: int) -> Body:
    """The body of /load_lora_adapter_from_tensors. The server compares the bytes that arrive with the checksums."""
    return {
        "lora_name": name,
        "config_dict": {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "target_modules": module_names(spec.targets),
            "lora_dropout": 0.0,
            "bias": "none",
        },
        "serialized_named_tensors": [pickled(copied(tensors))] * tp_size,
        "expected_checksums": {name: hashlib.sha256(bytes_of(tensor)).hexdigest() for name, tensor in tensors.items()},
    }


def module_names(targets: Iterable[str]) -> list[str]:
    """The last parts of the names of adapted layers, such as q_proj of self_attn.q_proj."""
    return sorted({target.rpartition(".")[2] for target in targets})
