"""A fake SGLang server (SRT 0.5.23): the same HTTP messages as the real one, with a small model of UniRL behind them.

It runs on a CPU without sglang. It takes over weights and adapters, and samples with a seed per row as the real server
does with --enable-deterministic-inference. It does not stream. tests/rollout/test_sglang_llm.py
compares its messages with recorded ones.
"""

from __future__ import annotations

import argparse
import binascii
import hashlib
import itertools
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unirl.models.language.pipeline import TextPipeline
from unirl.models.language.policy import tempered
from unirl.rollout.engine.vllm_omni.program.listener import WireServer
from unirl.testing.conformance.http_server import JsonReply, Routes, json_server
from unirl.testing.conformance.payloads import tensors_in
from unirl.testing.conformance.prompt_images import REPAINTS, images_in
from unirl.testing.conformance.served import ServedModel
from unirl.testing.conformance.token_model import TokenModel
from unirl.testing.conformance.token_scheduler import DecodedRow, TokenScheduler
from unirl.types.conditions import Conditions
from unirl.types.sampling import ARSamplingParams

VERSION = "0.5.23"
SAMPLING_KEYS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex"),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice"),
)
"""All sampling parameters of the real server, in the order of its own message."""
USED_KEYS = (
    *("max_new_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "min_new_tokens", "n"),
    *("skip_special_tokens", "sampling_seed"),
)
"""Those that this one knows, too."""
DEFAULT_SEED = 42
"""The seed of a row without one, with deterministic inference."""
DIES_AT, EVERY = 10, 3
"""Numbers of the responses that some faults strike."""
SLOW_S = 2.0
EXCHANGE_S = 0.5
"""Seconds that a response waits for another one to be exchanged with."""
NO_SESSION = "no weight-update session is open; call begin_weight_update() first"
Body = dict[str, Any]


class Refused(Exception):
    """The server answers with status 400 and this message."""


class FakeSGLang:
    """The state of the server, and a function for every path."""

    def __init__(
        self, model: TokenModel, path: str, dtype: str, arguments: argparse.Namespace, fault: str | None
    ) -> None:
        self.model = model
        self.path = path
        self.dtype = dtype
        self.arguments = arguments
        self.fault = fault
        self.scheduler = TokenScheduler(model, "default")
        self.loaded: dict[str, str] = {}
        """The names of adapters."""
        self.has_session = False
        self.num_updates = 0
        self.keeps_cache = True
        """Running requests keep their keys and values during a pause. False: they compute them again afterwards."""
        self.is_asleep = False
        self.stored: dict[str, Tensor] = {}
        """The weights while it sleeps."""
        self.counter = itertools.count(1)
        self.exchange = RowExchange()
        self.repaint = REPAINTS.get(fault, bytes)
        if fault == "other-model":
            self.scheduler.bend = lambda logits: logits.roll(1, dims=1)
        if fault == "other-temperature":
            self.scheduler.log_probs = lambda logits, params: tempered(logits, 2 * (params.temperature or 1.0))

    def routes(self) -> Routes:
        """The paths that it answers."""
        posts: Mapping[str, Callable[[Body], JsonReply]] = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/flush_cache": self.flush_cache,
            "/begin_weight_update": self.begin_weight_update,
            "/update_weights_from_tensor": self.update_weights_from_tensor,
            "/end_weight_update": self.end_weight_update,
            "/update_weight_version": self.update_weight_version,
            "/weights_checker": self.weights_checker,
            "/load_lora_adapter_from_tensors": self.load_lora_adapter_from_tensors,
            "/unload_lora_adapter": self.unload_lora_adapter,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
        }
        gets: Mapping[str, Callable[[Body], JsonReply]] = {
            "/ready": lambda body: JsonReply(),
            "/health": lambda body: JsonReply(),
            "/server_info": self.server_info,
            "/model_info": self.model_info,
        }
        named = {("POST", path): handler for path, handler in posts.items()}
        named |= {("GET", path): handler for path, handler in gets.items()}
        return {key: guarded(handler) for key, handler in named.items()}

    # Responses

    def generate(self, body: Body) -> JsonReply:
        number = next(self.counter)
        if self.fault == "slow":
            time.sleep(SLOW_S)
        prompts, is_batch = prompts_in(body)
        rows = self._rows(body, prompts, images_in(body, len(prompts), is_batch))
        if self.fault == "die" and number == DIES_AT:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.time()
        if self.fault == "close" and number % EVERY == 0:
            return JsonReply(cut=0)
        self.scheduler.complete(rows)
        if self.fault == "swap-rows":
            self.exchange.swap(rows[0])
        answers = [self._answer(row, body, time.time() - began) for row in rows]
        cut = 0.5 if self.fault == "half-answer" and number % EVERY == 0 else None
        return JsonReply(200, answers if is_batch else answers[0], cut)

    def _rows(
        self, body: Body, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]]
    ) -> list[DecodedRow]:
        """The rows of a request. Raises Refused as the real server does."""
        count = len(prompts)
        rids = spread(body.get("rid"), count) or [uuid.uuid4().hex for _ in prompts]
        doubled = sorted({rid for rid in rids if rids.count(rid) > 1})
        if doubled:
            raise Refused(f"Duplicate request IDs detected within the request: {doubled}")
        adapters = spread(body.get("lora_path"), count) or [None] * count
        for adapter in adapters:
            if adapter is not None and adapter not in self.loaded:
                raise Refused(
                    f"Got LoRA adapter that has never been loaded: {adapter}\nAll loaded adapters: "
                    f"dict_keys({list(self.loaded)})."
                )
        given = body.get("sampling_params") or {}
        settings = given if isinstance(given, list) else [given] * count
        scored = body.get("token_ids_logprob") or ()
        read = [self._read(*each) for each in zip(prompts, images, strict=True)]
        return [self._row(*each, scored) for each in zip(rids, read, settings, adapters, strict=True)]

    def _read(self, tokens: Sequence[int], images: Sequence[bytes]) -> Conditions:
        """The conditions of a prompt. Raises Refused if its placeholders and images do not match."""
        try:
            return self.model.pipeline.from_plain(tokens, [self.repaint(image) for image in images])
        except ValueError as error:
            raise Refused(str(error)) from error

    def _row(
        self, rid: str, conditions: Conditions, given: Body, adapter: str | None, scored: Sequence[int]
    ) -> DecodedRow:
        facts = self.model.bundle.facts
        [prompt] = [plain.expanded for plain in self.model.pipeline.plain_prompts(conditions)]
        context = self.arguments.context_length or facts.context_length
        if len(prompt) >= context:
            raise Refused(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            )
        if given.get("top_k") == 0:
            raise Refused("top_k must be -1 (disable) or at least 1, got 0.")
        unused = [key for key in given if key not in USED_KEYS]
        if unused or given.get("n", 1) != 1:
            raise Refused(f"the fake server does not support {unused[0] if unused else 'n > 1'}")
        params = ARSamplingParams(
            max_new_tokens=given.get("max_new_tokens", 128),
            temperature=given.get("temperature", 1.0),
            top_p=given.get("top_p", 1.0),
            top_k=max(given.get("top_k", -1), 0),
            min_new_tokens=given.get("min_new_tokens", 0),
        )
        seed = given.get("sampling_seed", DEFAULT_SEED)
        if not self.arguments.enable_deterministic_inference or self.fault == "ignore-seeds":
            seed = None
        ends = (*self.model.bundle.codec.ends, *given.get("stop_token_ids", ()))
        return DecodedRow(rid, prompt, conditions, params, ends, seed, adapter, scored)

    def _answer(self, row: DecodedRow, body: Body, seconds: float) -> Body:
        """The JSON of one response."""
        count = len(row.tokens) - (1 if self.fault == "fewer-tokens" else 0)
        tokens, logps = row.tokens[:count], list(row.logps[:count])
        if self.fault == "nan-logp" and not row.scored:
            logps[0] = float("nan")
        versions = row.versions[:count]
        if self.fault == "version-skew" and count > 1:
            versions = [*versions[:-1], "another"]
        with_text = bool(body.get("return_text_in_logprobs"))
        texts = [self.model.bundle.codec.spell([token]) if with_text else None for token in tokens]
        meta: Body = {
            "id": row.rid,
            "finish_reason": finish_reason(row),
            "prompt_tokens": len(row.prompt),
            "weight_version": self.scheduler.version,
            "num_retractions": 0,
        }
        if body.get("return_logprob"):
            meta |= {
                "input_token_logprobs": [],
                "output_token_logprobs": list(zip(logps, tokens, texts, strict=True)),
                "output_token_logprobs_length": len(tokens),
            }
        if row.scored:
            scored = [
                [(logp, token, None) for logp, token in zip(each, row.scored, strict=True)] for each in row.scores
            ]
            meta |= {"input_token_ids_logprobs": [], "output_token_ids_logprobs": scored}
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(row.tokens),
            "cached_tokens": 0,
            "weight_versions": spans(versions),
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": seconds,
            "response_sent_to_client_ts": time.time(),
        }
        answer: Body = {"text": self.model.bundle.codec.decode(tokens), "output_ids": tokens, "meta_info": meta}
        return answer | ({"prompt_token_ids": list(row.prompt)} if body.get("return_prompt_token_ids") else {})

    def abort_request(self, body: Body) -> JsonReply:
        self.scheduler.abort(None if body.get("abort_all") else body.get("rid", ""))
        return JsonReply()

    def pause_generation(self, body: Body) -> JsonReply:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return JsonReply(400, {"object": "error", "message": "Input should be 'abort', 'retract' or 'in_place'"})
        self.scheduler.pause(True)
        self.keeps_cache = mode == "in_place"
        if mode == "abort":
            self.scheduler.abort(None)
        return JsonReply(200, {"message": "Generation paused successfully.", "status": "ok"})

    def continue_generation(self, body: Body) -> JsonReply:
        self.scheduler.pause(False)
        return JsonReply(200, {"message": "Generation continued successfully.", "status": "ok"})

    def flush_cache(self, body: Body) -> JsonReply:
        if not self.scheduler.is_idle(60.0):
            return JsonReply(400, b"Flush cache failed.\n")
        return JsonReply(200, b"Cache flushed.\n")

    # Weights

    def begin_weight_update(self, body: Body) -> JsonReply:
        if self.has_session:
            return outcome(False, "a weight-update session is already open; call end_weight_update() first")
        self.has_session, self.num_updates = True, self.num_updates + 1
        return outcome(True, "Success")

    def end_weight_update(self, body: Body) -> JsonReply:
        if not self.has_session:
            return outcome(False, NO_SESSION)
        self.has_session = False
        return outcome(True, "Success")

    def update_weights_from_tensor(self, body: Body) -> JsonReply:
        if not self.has_session:
            must = "must run between begin_weight_update() and end_weight_update()"
            return outcome(False, f"update_weights_from_tensor {must}")
        if body.get("load_format") is not None:
            return outcome(False, f"the fake server does not support load_format {body['load_format']}")
        with self.scheduler.between_requests():
            if self.fault != "stale-weights" or self.num_updates == 1:
                for name, tensor in tensors_in(body["serialized_named_tensors"][0]).items():
                    self.model.store(name, tensor.bfloat16() if self.fault == "wrong-dtype" else tensor)
            if body.get("flush_cache", True) and self.scheduler.running and self.keeps_cache:
                return outcome(
                    False,
                    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                    "Retract or finish them, then call /flush_cache.",
                )
            version = body.get("weight_version")
            if version is None:
                return outcome(True, "Success")
            self.scheduler.version = version
        return outcome(True, f"Success Weight version updated to {version}.")

    def update_weight_version(self, body: Body) -> JsonReply:
        if body.get("abort_all_requests", True):
            self.scheduler.abort(None)
        version = self.scheduler.version = body["new_version"]
        message = f"Weight version updated to {version}"
        return JsonReply(200, {"success": True, "message": message, "new_version": version})

    def weights_checker(self, body: Body) -> JsonReply:
        if body.get("action", "checksum") != "checksum":
            raise Refused(f"Unsupported action={body['action']!r}")
        with self.scheduler.between_requests():
            checksums = {name: digest[:16] for name, digest in self.model.checksums().items()}
        whole = hashlib.sha256("".join(f"{name}{checksums[name]}" for name in sorted(checksums)).encode()).hexdigest()
        place = {"role": "target", **dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)}
        place |= dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        rank = {"checksums": checksums, "per_gpu_checksum": whole, "parallelism_info": [place]}
        engine = hashlib.sha256(whole.encode()).hexdigest()
        body = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": engine}
        return JsonReply(200, body)

    def load_lora_adapter_from_tensors(self, body: Body) -> JsonReply:
        name, config = body["lora_name"], body["config_dict"]
        if not self.arguments.enable_lora:
            return self._adapters(False, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.loaded:
            return self._adapters(False, f"Failed to load LoRA adapter {name} because it is already loaded")
        if config["r"] > self.arguments.max_lora_rank:
            return self._adapters(False, f"rank {config['r']} is larger than --max-lora-rank")
        tensors = tensors_in(body["serialized_named_tensors"][0])
        first = next(iter(self.model.adapters.values()), None)
        with self.scheduler.between_requests():
            while len(self.loaded) >= self.arguments.max_loaded_loras:
                del self.loaded[next(iter(self.loaded))]
            self.model.load_adapter(name, tensors, config["r"], config["lora_alpha"])
            if self.fault == "stale-weights" and first is not None:
                self.model.adapters[name] = first
            self.loaded[name] = "__tensor__"
        return self._adapters(True)

    def unload_lora_adapter(self, body: Body) -> JsonReply:
        name = body["lora_name"]
        if name not in self.loaded:
            known = f"odict_keys({list(self.loaded)})"
            return self._adapters(False, f"LoRA with name {name} does not exist. Loaded LoRAs: {known}", None)
        with self.scheduler.between_requests():
            del self.loaded[name]
        return self._adapters(True)

    def _adapters(self, success: bool, message: str = "", loaded: object = ...) -> JsonReply:
        shown = dict(self.loaded) if loaded is ... else loaded
        body = {"rid": None, "http_worker_ipc": None, "success": success, "error_message": message}
        return JsonReply(200 if success else 400, body | {"loaded_adapters": shown})

    # Memory

    def release_memory_occupation(self, body: Body) -> JsonReply:
        if not self.scheduler.is_idle(0.0):
            os.kill(os.getpid(), signal.SIGKILL)  # the real server ends by a failed assertion
        if self.arguments.enable_memory_saver:
            if self.arguments.enable_weights_cpu_backup:
                self.stored = {name: each.data.clone() for name, each in self.model.parameters.items()}
            self.model.forget()
        self.is_asleep = True
        return JsonReply(200, None)

    def resume_memory_occupation(self, body: Body) -> JsonReply:
        if not self.is_asleep:
            os.kill(os.getpid(), signal.SIGKILL)  # the real server ends by a KeyError
        for name, tensor in self.stored.items():
            self.model.parameters[name].data.copy_(tensor)
        self.is_asleep, self.stored = False, {}
        return JsonReply(200, None)

    # Facts

    def server_info(self, body: Body) -> JsonReply:
        own = {"model_path": self.path, "dtype": self.dtype, "device": "cpu", "dp_size": 1, "version": VERSION}
        return JsonReply(200, {**vars(self.arguments), "skip_tokenizer_init": False, **own})

    def model_info(self, body: Body) -> JsonReply:
        info = {
            "model_path": self.path,
            "served_model_name": self.path,
            "tokenizer_path": self.path,
            "is_generation": True,
            "weight_version": self.scheduler.version,
            "model_type": self.model.bundle.family.name,
            "architectures": [self.model.bundle.family.model_class],
        }
        return JsonReply(200, info)


def guarded(handler: Callable[[Body], JsonReply]) -> Callable[[object], JsonReply]:
    """The handler, whose refusals and missing keys become responses of status 400."""

    def answer(body: object) -> JsonReply:
        try:
            return handler(body if isinstance(body, dict) else {})
        except Refused as error:
            return JsonReply(400, {"error": {"message": str(error)}})
        except UnknownField as error:
            return JsonReply(400, {"error": str(error)})
        except (KeyError, TypeError, ValueError, binascii.Error, pickle.UnpicklingError) as error:
            return JsonReply(400, {"object": "error", "message": f"{type(error).__name__}: {error}"})

    return answer


class UnknownField(Exception):
    """A sampling parameter that the server does not know."""


def prompts_in(body: Body) -> tuple[list[list[int]], bool]:
    """The prompts of a request, and True if it has a list of them. Raises Refused without any."""
    ids = body.get("input_ids")
    if not ids:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    given = body.get("sampling_params") or {}
    for settings in given if isinstance(given, list) else [given]:
        for key in settings:
            if key not in SAMPLING_KEYS:
                expected = ", ".join(f"`{name}`" for name in SAMPLING_KEYS)
                raise UnknownField(f"unknown field `{key}`, expected one of {expected}")
    return (ids, True) if isinstance(ids[0], list) else ([ids], False)


def spread(value: Any, count: int) -> list[Any] | None:
    """A value for each row. None if there is no value."""
    if value is None:
        return None
    return list(value) if isinstance(value, list) else [value] * count


class RowExchange:
    """Exchanges what was sampled for two prompts whose responses are about to be sent."""

    def __init__(self) -> None:
        self.waiting: list[DecodedRow] = []
        self.changed = threading.Condition()

    def swap(self, row: DecodedRow) -> None:
        """Exchange a row with one of another prompt. Returns soon if none comes."""
        with self.changed:
            partner = next((other for other in self.waiting if other.prompt != row.prompt), None)
            if partner is None:
                self.waiting.append(row)
                self.changed.wait_for(lambda: row not in self.waiting, EXCHANGE_S)
                if row in self.waiting:
                    self.waiting.remove(row)
                return
            self.waiting.remove(partner)
            for name in ("tokens", "logps", "scores", "versions", "ending"):
                vars(partner)[name], vars(row)[name] = vars(row)[name], vars(partner)[name]
            self.changed.notify_all()


def finish_reason(row: DecodedRow) -> Body:
    """How a response ended."""
    if row.ending == "stop":
        return {"type": "stop", "matched": row.tokens[-1]}
    if row.ending == "length":
        return {"type": "length", "length": len(row.tokens)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def spans(versions: Sequence[str]) -> list[Body]:
    """Runs of equal names, as [start, end) of their tokens."""
    result: list[Body] = []
    for version, places in itertools.groupby(range(len(versions)), key=lambda place: versions[place]):
        run = list(places)
        result.append({"version": version, "start": run[0], "end": run[-1] + 1})
    return result


def outcome(success: bool, message: str) -> JsonReply:
    """The response to a request about weights."""
    return JsonReply(200 if success else 400, {"success": success, "message": message})


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of the real server that matter here. Others are ignored."""
    parser = argparse.ArgumentParser(prog="fake SGLang", allow_abbrev=False)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-lora-rank", type=int, default=0)
    parser.add_argument("--lora-target-modules", nargs="*")
    parser.add_argument("--max-loaded-loras", type=int, default=8)
    parser.add_argument("--max-loras-per-batch", type=int, default=8)
    for flag in (
        "--enable-deterministic-inference",
        "--enable-memory-saver",
        "--enable-weights-cpu-backup",
        "--enable-lora",
    ):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(list(words))[0]


def fake_sglang(model: ServedModel, port: int, words: Sequence[str], fault: str | None) -> WireServer:
    """A server that answers while its `serve_forever` runs.

    Args:
        words: arguments of the real server.
        fault: a name of `FAULTS`.
    """
    pipeline = model.load()
    assert isinstance(pipeline, TextPipeline), f"{model.pipeline} is no language model"
    name = str(pipeline.bundle.dtype).removeprefix("torch.")
    fake = FakeSGLang(TokenModel(pipeline), model.path, name, parsed(words), fault)
    return json_server(port, fake.routes(), fault)
