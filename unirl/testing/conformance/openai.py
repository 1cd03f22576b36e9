"""A fake OpenAI-compatible server with the messages of vLLM 0.33.0, and a small model of UniRL behind them.

It runs on a CPU without vllm. It takes over weights from folders, and samples with a seed per row. It neither streams
nor chats. tests/rollout/test_openai.py compares its messages with recorded ones of real servers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unirl.models.language.pipeline import TextPipeline
from unirl.models.language.policy import tempered
from unirl.models.language.sampling import top_k_tokens, top_p_weights
from unirl.rollout.engine.vllm_omni.program.listener import WireServer
from unirl.testing.conformance.http_server import JsonReply, Routes, json_server
from unirl.testing.conformance.served import ServedModel
from unirl.testing.conformance.sglang_llm import DIES_AT, EVERY, SLOW_S, Refused, RowExchange, guarded, spans
from unirl.testing.conformance.token_model import TokenModel
from unirl.testing.conformance.token_scheduler import DecodedRow, TokenScheduler
from unirl.types.sampling import ARSamplingParams

RANK = "dp0:pp0:pcp0:tp0"
"""The name of the only rank in checksums."""
Body = dict[str, Any]


class FakeOpenAI:
    """The state of the server, and a function for every path."""

    def __init__(self, model: TokenModel, path: str, arguments: argparse.Namespace, fault: str | None) -> None:
        self.model = model
        self.name = arguments.served_model_name or path
        self.arguments = arguments
        self.fault = fault
        self.scheduler = TokenScheduler(model, "default")
        self.num_updates = 0
        self.is_asleep = False
        self.counter = itertools.count(1)
        self.exchange = RowExchange()
        self.scheduler.log_probs = LOG_PROBS[arguments.logprobs_mode]
        if fault == "other-model":
            self.scheduler.bend = lambda logits: logits.roll(1, dims=1)
        if fault == "other-temperature":
            self.scheduler.log_probs = lambda logits, params: tempered(logits, 2 * (params.temperature or 1.0))

    def routes(self) -> Routes:
        """The paths that it answers."""
        named: dict[tuple[str, str], Callable[[Body], JsonReply]] = {
            ("POST", "/v1/completions"): self.completions,
            ("GET", "/v1/models"): self.models,
            ("GET", "/health"): lambda body: JsonReply(),
        }
        if self.fault != "no-dev-mode":
            named |= {
                ("POST", "/collective_rpc"): self.collective_rpc,
                ("POST", "/reset_prefix_cache"): lambda body: JsonReply(200, {"success": True}),
                ("POST", "/update_weight_version"): self.update_weight_version,
                ("GET", "/weight_info"): lambda body: JsonReply(200, {"weight_version": self.scheduler.version}),
                ("POST", "/weight_checker"): self.weight_checker,
                ("POST", "/sleep"): lambda body: self._set_asleep(True),
                ("POST", "/wake_up"): lambda body: self._set_asleep(False),
            }
        return {key: guarded(handler) for key, handler in named.items()}

    # Responses

    def completions(self, body: Body) -> JsonReply:
        number = next(self.counter)
        if self.fault == "slow":
            time.sleep(SLOW_S)
        if body.get("model") != self.name:
            return failure(404, f"The model `{body.get('model')}` does not exist. Valid aliases: {self.name}.")
        if self.is_asleep:
            return failure(500, "the engine sleeps")
        row = self._row(body)
        if self.fault == "die" and number == DIES_AT:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if self.fault == "close" and number % EVERY == 0:
            return JsonReply(cut=0)
        self.scheduler.complete([row])
        if self.fault == "swap-rows" and row.params.max_new_tokens > 1:  # a probe sends its requests one by one
            self.exchange.swap(row)
        cut = 0.5 if self.fault == "half-answer" and number % EVERY == 0 else None
        return JsonReply(200, self._answer(row, body), cut)

    def _row(self, body: Body) -> DecodedRow:
        """The row of a request. Raises Refused as the real server does."""
        prompt, size = body.get("prompt"), self.model.bundle.facts.vocab_size
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int) or body.get("n", 1) != 1:
            raise Refused("the fake server takes one prompt of token ids, and n=1")
        unknown = [token for token in prompt if token >= size]
        if unknown:
            raise Refused(f"Token id {unknown[0]} is out of vocabulary")
        context = self.arguments.max_model_len or self.model.bundle.facts.context_length
        if len(prompt) + body["max_tokens"] > context:
            raise Refused(f"This model's maximum context length is {context} tokens.")
        if not 0 <= body.get("temperature", 1.0) <= 2:
            raise Refused(f"temperature must be in [0, 2], got {body['temperature']}.")
        params = ARSamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            top_k=max(body.get("top_k", 0), 0),
        )
        ends = (*self.model.bundle.codec.ends, *body.get("stop_token_ids", ()))
        seed = None if self.fault == "ignore-seeds" else body.get("seed")
        conditions = self.model.pipeline.from_plain(prompt, ())
        return DecodedRow(uuid.uuid4().hex, prompt, conditions, params, ends, seed)

    def _answer(self, row: DecodedRow, body: Body) -> Body:
        """The JSON of one response, with the fields of the real server."""
        count = len(row.tokens) - (1 if self.fault == "fewer-tokens" else 0)
        tokens, logps = row.tokens[:count], list(row.logps[:count])
        if self.fault == "nan-logp" and row.params.max_new_tokens > 1:
            logps[0] = float("nan")
        versions = row.versions[:count]
        if self.fault == "version-skew" and count > 1:
            versions = [*versions[:-1], "another"]
        texts = [self.model.bundle.codec.spell([token]) for token in tokens]
        logprobs = {
            "text_offset": list(itertools.accumulate(map(len, texts), initial=0))[:-1],
            "token_logprobs": logps,
            "tokens": texts,
            "top_logprobs": [{text: logp} for text, logp in zip(texts, logps, strict=True)],
        }
        choice = {
            "index": 0,
            "text": self.model.bundle.codec.decode(tokens),
            "logprobs": None if self.fault == "no-logprobs" or body.get("logprobs") is None else logprobs,
            "finish_reason": row.ending,
            "stop_reason": None,
            "token_ids": None if self.fault == "text-only" or not body.get("return_token_ids") else tokens,
            "prompt_logprobs": None,
            "prompt_token_ids": list(row.prompt) if body.get("return_token_ids") else None,
            "routed_experts": None,
            "weight_versions": spans(versions) if body.get("return_weight_versions") else None,
        }
        prompt, count = len(row.prompt), len(row.tokens)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
        return {
            "id": f"cmpl-{row.rid}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": "another" if self.fault == "other-name" else self.name,
            "choices": [] if self.fault == "fewer-rows" else [choice],
            "service_tier": None,
            "system_fingerprint": "fake",
            "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def models(self, body: Body) -> JsonReply:
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "vllm", "root": self.name, "parent": None}
        return JsonReply(200, {"object": "list", "data": [card]})

    # Weights and sleep

    def collective_rpc(self, body: Body) -> JsonReply:
        if body["method"] != "reload_weights":
            return failure(500, f"the fake server does not support {body['method']}")
        self.num_updates += 1
        with self.scheduler.between_requests():
            if self.fault != "stale-weights" or self.num_updates == 1:
                for file in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
                    for name, tensor in load_file(file).items():
                        self.model.store(name, tensor.bfloat16() if self.fault == "wrong-dtype" else tensor)
        return JsonReply(200, {"results": [None]})

    def update_weight_version(self, body: Body) -> JsonReply:
        self.scheduler.version = body["new_version"]
        return JsonReply(200, {"success": True, "new_version": body["new_version"]})

    def weight_checker(self, body: Body) -> JsonReply:
        if body["action"] != "checksum":
            raise Refused(f"the fake server does not support the action {body['action']}")
        with self.scheduler.between_requests():
            checksums = self.model.checksums()
        return JsonReply(200, {"checksums": {f"{RANK}:{name}": digest for name, digest in checksums.items()}})

    def _set_asleep(self, is_asleep: bool) -> JsonReply:
        self.is_asleep = is_asleep
        return JsonReply(200, {"status": "sleeping" if is_asleep else "awake"})


def failure(status: int, message: str) -> JsonReply:
    """An error in the form of vLLM."""
    return JsonReply(status, {"error": {"message": message, "type": "Error", "param": None, "code": status}})


def raw(logits: Tensor, params: ARSamplingParams) -> Tensor:
    """Log-probs [B, V] at temperature 1."""
    return tempered(logits, 1.0)


def processed(logits: Tensor, params: ARSamplingParams) -> Tensor:
    """Log-probs [B, V] of the distribution that tokens are drawn from; at temperature 1 for greedy decoding."""
    logps = tempered(logits, params.temperature)
    if params.temperature == 0:
        return logps
    if params.top_k > 0:
        kept = top_k_tokens(logps, params.top_k)
        logps = torch.full_like(logps, -torch.inf).scatter(1, kept, logps.gather(1, kept))
    return top_p_weights(logps, params.top_p).log().log_softmax(-1).float()


LOG_PROBS: Mapping[str, Callable[[Tensor, ARSamplingParams], Tensor]] = {
    "raw_logprobs": raw,
    "processed_logprobs": processed,
}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of vLLM that matter here. Others are ignored."""
    parser = argparse.ArgumentParser(prog="fake vLLM", allow_abbrev=False)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--logprobs-mode", choices=list(LOG_PROBS), default="raw_logprobs")
    return parser.parse_known_args(list(words))[0]


def fake_openai(model: ServedModel, port: int, words: Sequence[str], fault: str | None) -> WireServer:
    """A server that answers while its `serve_forever` runs.

    Args:
        words: arguments of `vllm serve`.
        fault: a name of `FAULTS`.
    """
    pipeline = model.load()
    assert isinstance(pipeline, TextPipeline), f"{model.pipeline} is no language model"
    return json_server(port, FakeOpenAI(TokenModel(pipeline), model.path, parsed(words), fault).routes(), fault)
