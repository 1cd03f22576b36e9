"""A fake diffusion server of SGLang (0.5.23): the same HTTP messages as the real one, with a small model of UniRL.

It runs on a CPU without sglang. It draws noise as the real server does: one generator per sample, first x_T, then the
noise of each stochastic step. It samples one image per request. tests/rollout/test_sglang.py compares its messages with
recorded ones.
"""

from __future__ import annotations

import binascii
import itertools
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from unirl.rollout.engine.sglang.messages import KERNELS, MODULE
from unirl.rollout.engine.vllm_omni.program.listener import WireServer
from unirl.sde.kernels import EulerODE
from unirl.testing.conformance.http_server import JsonReply, Routes, json_server
from unirl.testing.conformance.latent_model import LatentModel, SampledTrajectory, latent_model
from unirl.testing.conformance.payloads import tensors_in
from unirl.testing.conformance.served import ServedModel
from unirl.types.protocols import Kernel
from unirl.types.sampling import DiffusionSamplingParams

VERSION = "0.5.23"
DIES_AT, EVERY, CHANGES_AT = 10, 3, 5
"""Numbers of the samples that some faults strike."""
SLOW_S = 2.0
EXCHANGE_S = 0.5
"""Seconds that a sample waits for another one to be exchanged with."""
SHOWN_NAMES = 5
"""Names that a message lists."""
KERNEL_CLASSES: Mapping[str, Callable[..., Kernel]] = {name: kind for kind, name in KERNELS.items()}
Body = dict[str, Any]
SampledT = TypeVar("SampledT")


class RequestRefused(Exception):
    """The server answers with this status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class FakeSGLangDiffusion:
    """The state of the server, and a function for every path."""

    def __init__(self, model: LatentModel, path: str, fault: str | None) -> None:
        self.model = model
        self.path = path
        self.fault = fault
        self.lock = threading.Lock()
        self.counter = itertools.count(1)
        self.num_updates = 0
        self.is_asleep = False
        self.exchange: LatentExchange[SampledTrajectory] = LatentExchange()
        if fault == "other-model":
            model.sign = -1.0

    def routes(self) -> Routes:
        """The paths that it answers."""
        posts: Mapping[str, Callable[[Body], JsonReply]] = {
            "/rollout/generate": self.generate,
            "/update_weights_from_tensor": self.update_weights_from_tensor,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weights_from_tensor_checker": self.update_weights_from_tensor_checker,
            "/get_weights_checksum": self.get_weights_checksum,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
        }
        gets: Mapping[str, Callable[[Body], JsonReply]] = {
            "/health": lambda body: JsonReply(200, {"status": "ok"}),
            "/server_info": self.server_info,
            "/model_info": self.model_info,
        }
        named = {("POST", path): handler for path, handler in posts.items()}
        named |= {("GET", path): handler for path, handler in gets.items()}
        return {key: answering(handler) for key, handler in named.items()}

    # Samples

    def generate(self, body: Body) -> JsonReply:
        number = next(self.counter)
        if self.is_asleep:
            raise RequestRefused(500, "Server is sleeping. Call resume_memory_occupation first.")
        if self.fault == "slow":
            time.sleep(SLOW_S)
        if self.fault == "close" and number % EVERY == 0:
            return JsonReply(cut=0)
        if self.fault == "die" and number == DIES_AT:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        params = self._params(body)
        seed = None if self.fault == "ignore-seeds" else int(body["seed"])
        with self.lock:
            if self.fault == "version-skew" and number == CHANGES_AT:
                self.model.store({name: 1.01 * each for name, each in self.model.parameters().items()})
            sampled = self.model.sample(body["prompt"], params, seed)
        if self.fault == "swap-rows":
            sampled = self.exchange.swapped(body["prompt"], sampled)
        rows = [] if self.fault == "fewer-rows" else [self._row(body, params, sampled)]
        cut = 0.5 if self.fault == "half-answer" and number % EVERY == 0 else None
        return JsonReply(200, msgspec.msgpack.encode(rows), cut)

    def _params(self, body: Body) -> DiffusionSamplingParams:
        """The settings of a request, with the noise levels of the model's own schedule."""
        extra = body.get("extra_sampling_params") or {}
        unknown = [name for name in extra if name != "max_sequence_length"]
        if unknown:
            raise RequestRefused(400, f"Invalid sampling params: 400: unexpected keyword argument '{unknown[0]}'")
        if body.get("num_outputs_per_prompt", 1) != 1:
            raise RequestRefused(400, "the fake server samples one image per request")
        name, num_steps = body.get("rollout_sde_type", "sde"), int(body["num_inference_steps"])
        if name != "ode" and name not in KERNEL_CLASSES:
            raise RequestRefused(400, f"Invalid sampling params: unsupported rollout_sde_type {name!r}")
        if "max_sequence_length" in extra:
            extra = {"max_sequence_length": extra["max_sequence_length"] - self.model.family.extra_tokens}
        chosen = body.get("rollout_sde_step_indices")
        steps = () if name == "ode" else tuple(range(num_steps) if chosen is None else chosen)
        eta = float(body.get("rollout_noise_level", 0.7)) * (2 if self.fault == "other-noise-scale" else 1)
        params = DiffusionSamplingParams(
            kernel=EulerODE() if name == "ode" else KERNEL_CLASSES[name](eta=eta),
            num_inference_steps=num_steps,
            height=body["height"],
            width=body["width"],
            guidance_scale=1.0 if self.fault == "other-guidance" else body["guidance_scale"],
            negative_prompt=body["negative_prompt"],
            **extra,
        )
        facts = self.model.family.served(self.model.pipeline.facts)
        sigmas = facts.schedule.sigmas(num_steps, facts.image_seq_len(params)).tolist()
        if self.fault == "other-sigmas":
            sigmas = [sigma**0.9 for sigma in sigmas]
        if self.fault == "other-steps":
            steps = steps[1:]
        return replace(params, sigmas=tuple(sigmas), sde_indices=steps)

    def _row(self, body: Body, params: DiffusionSamplingParams, sampled: SampledTrajectory) -> Body:
        """The answer about one sample."""
        positions = body.get("rollout_return_step_indices") or range(params.num_inference_steps + 1)
        latents = self.model.family.packed(sampled.latents[list(positions)])
        if self.fault == "nan":
            latents = latents * float("nan")
        return {
            "request_id": str(uuid.uuid4()),
            "prompt": body["prompt"],
            "seed": body["seed"],
            "generated_output": wire_tensor(sampled.pixels),
            "rollout_log_probs": wire_tensor(sampled.logp),
            "rollout_debug_tensors": None,
            "denoising_env": None,
            "dit_trajectory": {
                "latents": wire_tensor(latents),
                "timesteps": wire_tensor(1000 * sampled.sigmas[list(positions)]),
                "sigmas": wire_tensor(sampled.sigmas),
            },
            "inference_time_s": None,
            "peak_memory_mb": None,
        }

    # Weights

    def update_weights_from_tensor(self, body: Body) -> JsonReply:
        [module] = body.get("target_modules") or [MODULE]
        if module != MODULE:
            return outcome(False, f"Module(s) requested for update not found in pipeline: ['{module}'].")
        tensors = self._with_faults(tensors_in(body["serialized_named_tensors"][0]))
        if body.get("weight_update_mode") != "lora_merge":
            self._store(tensors)
            return outcome(True, f"Updated 1 modules from tensor ({module}).")
        count = len({name.partition(".lora_")[0] for name in tensors})
        with self.lock:
            if not self._is_stale:
                self.model.load_adapter(tensors, body["lora_rank"], body["lora_alpha"])
            self.num_updates += 1
        return outcome(True, f"Updated {count} LoRA layers in {module} from IPC tensors (skipped 0 unknown layers).")

    def update_weights_from_disk(self, body: Body) -> JsonReply:
        from safetensors.torch import load_file

        [module] = body["target_modules"]
        files = sorted((Path(body["model_path"]) / module).glob("*.safetensors"))
        if not files:
            return outcome(False, f"Cannot update weights: missing weight files for modules: ['{module}'].")
        for file in files:
            self._store(self._with_faults(load_file(file)))
        return outcome(True, f"Updated 1 modules ({module}).")

    def _with_faults(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.fault == "wrong-dtype":
            return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        return tensors

    @property
    def _is_stale(self) -> bool:
        return self.fault == "stale-weights" and self.num_updates > 0

    def _store(self, tensors: Mapping[str, Tensor]) -> None:
        with self.lock:
            self.model.store({} if self._is_stale else tensors)
            self.num_updates += 1

    def update_weights_from_tensor_checker(self, body: Body) -> JsonReply:
        hashes = body["expected_named_tensors_sha256"]
        missing, unequal = ([], []) if self.fault == "stale-weights" else self.model.unequal(hashes)
        if not missing and not unequal:
            return outcome(True, f"Verified module '{MODULE}' update for {len(hashes)} tensor(s).")
        problems = {"missing": missing, "checksum mismatch for": unequal}
        parts = [f"{what} {len(names)} tensor(s): {first_of(names)}" for what, names in problems.items() if names]
        return outcome(False, f"Module '{MODULE}' update weight check failed: {'; '.join(parts)}")

    def get_weights_checksum(self, body: Body) -> JsonReply:
        wanted = body.get("module_names") or [MODULE]
        with self.lock:
            return JsonReply(200, {name: self.model.checksum() if name == MODULE else "not_found" for name in wanted})

    def release_memory_occupation(self, body: Body) -> JsonReply:
        self.is_asleep = True
        message = "released GPU memory (moved active modules to CPU)"
        return JsonReply(200, {"success": True, "sleeping": True, "message": message})

    def resume_memory_occupation(self, body: Body) -> JsonReply:
        message = "no restore map; marked awake" if self.is_asleep else "already awake"
        self.is_asleep = False
        return JsonReply(200, {"success": True, "sleeping": False, "message": message})

    # Facts

    def server_info(self, body: Body) -> JsonReply:
        name = self.model.family.model_id
        facts = {"model_path": self.path, "served_model_name": name, "tp_size": 1, "dp_size": 1, "version": VERSION}
        return JsonReply(200, facts)

    def model_info(self, body: Body) -> JsonReply:
        kind = self.model.pipeline.bundle.family.pipeline
        return JsonReply(
            200,
            {
                "model_path": self.path,
                "is_generation": True,
                "model_type": "diffusion",
                "architectures": [kind],
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "task_type": "T2I",
                "supported_task_types": ["T2I"],
                "output_types": ["IMAGE"],
                "is_image_gen": True,
            },
        )


class LatentExchange(Generic[SampledT]):
    """Exchanges the samples of two prompts whose answers are about to be sent."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, SampledT, list[SampledT]]] = []
        self.changed = threading.Condition()

    def swapped(self, prompt: str, sampled: SampledT) -> SampledT:
        """The sample of another prompt, which gets `sampled`. Returns `sampled` if none comes soon."""
        with self.changed:
            for entry in self.waiting:
                other_prompt, other, given = entry
                if other_prompt != prompt and not given:
                    given.append(sampled)
                    self.changed.notify_all()
                    return other
            mine: tuple[str, SampledT, list[SampledT]] = (prompt, sampled, [])
            self.waiting.append(mine)
            self.changed.wait_for(lambda: bool(mine[2]), EXCHANGE_S)
            self.waiting = [entry for entry in self.waiting if entry is not mine]
            return mine[2][0] if mine[2] else sampled


def wire_tensor(tensor: Tensor) -> Body:
    """A tensor in an answer."""
    from safetensors.torch import save

    data = save({"t": tensor.detach().contiguous()})
    return {"__tensor__": True, "data": data, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def first_of(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f", ... (+{len(names) - SHOWN_NAMES} more)" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def outcome(success: bool, message: str) -> JsonReply:
    """The answer to a request about weights."""
    return JsonReply(200 if success else 400, {"success": success, "message": message})


def answering(handler: Callable[[Body], JsonReply]) -> Callable[[object], JsonReply]:
    """The handler, whose refusals and missing keys become answers with an error."""

    def answer(body: object) -> JsonReply:
        try:
            return handler(body if isinstance(body, dict) else {})
        except RequestRefused as error:
            return JsonReply(error.status, {"detail": str(error)})
        except (KeyError, TypeError, ValueError, binascii.Error, pickle.UnpicklingError) as error:
            return JsonReply(400, {"detail": f"{type(error).__name__}: {error}"})

    return answer


def fake_sglang_diffusion(model: ServedModel, port: int, words: Sequence[str], fault: str | None) -> WireServer:
    """A server that answers while its `serve_forever` runs.

    Args:
        words: arguments of the real server, which are ignored.
        fault: a name of `FAULTS["sglang"]`.
    """
    fake = FakeSGLangDiffusion(latent_model(model), model.path, fault)
    return json_server(port, fake.routes(), fault)
