"""A fake server of vLLM-Omni: the messages of UniRL's own program for it, with a small model of UniRL in its place.

It runs on a CPU without vllm-omni. The paths, the recorder of trajectories and the reading of weights are those of the
program (unirl/rollout/engine/vllm_omni/program); only the network and its adapters are others.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unirl.distributed.weight_sync.fingerprint import Fingerprint, fingerprints
from unirl.rollout.engine.vllm_omni.families import FAMILIES
from unirl.rollout.engine.vllm_omni.program.listener import Handler, WireReply, WireServer, wire_server
from unirl.rollout.engine.vllm_omni.program.trajectory import RecordingScheduler, Schedule, seeded_draws
from unirl.rollout.engine.vllm_omni.program.weights import BucketReader
from unirl.rollout.engine.vllm_omni.program.wire import Body, Wire
from unirl.sde.kernels import EulerODE
from unirl.testing.conformance.http_server import without_weights
from unirl.testing.conformance.latent_model import LatentModel, latent_model
from unirl.testing.conformance.served import ServedModel
from unirl.testing.conformance.sglang import CHANGES_AT, DIES_AT, EVERY, SLOW_S, LatentExchange
from unirl.testing.conformance.token_model import adapter_parameter
from unirl.types.sampling import DiffusionSamplingParams

CPU = torch.device("cpu")


class FakeOmni:
    """The state of the server."""

    def __init__(self, model: LatentModel, path: str, fault: str | None) -> None:
        self.model = model
        self.path = path
        self.fault = fault
        self.lock = threading.Lock()
        self.counter = itertools.count(1)
        self.reader = BucketReader(CPU)
        self.name: str | None = ""
        """The name of the present weights. None: a transfer is under way."""
        self.next_name = ""
        self.adapter: Mapping[str, Any] | None = None
        self.received: dict[str, Tensor] = {}
        self.num_transfers = 0
        self.is_asleep = False
        self.exchange: LatentExchange[dict[str, Tensor]] = LatentExchange()
        if fault == "other-model":
            model.sign = -1.0

    def info(self) -> Body:
        return {
            "engine": "fake",
            "version": "",
            "pipeline": FAMILIES[self.model.pipeline.facts.family].pipeline,
            "model": self.path,
            "dtype": str(self.model.pipeline.bundle.dtype).removeprefix("torch."),
            "can_sleep": True,
        }

    # Samples

    def sample(self, order: Body) -> tuple[dict[str, Tensor], dict[str, str]]:
        number = next(self.counter)
        if self.is_asleep or self.name is None:
            raise RuntimeError("the server sleeps, or new weights are on their way")
        if self.fault == "slow":
            time.sleep(SLOW_S)
        if self.fault == "die" and number == DIES_AT:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        told = {"id": order["id"], "prompt": order["prompt"]}
        told["weights"] = "of-another-run" if self.fault == "version-skew" and number >= CHANGES_AT else self.name
        with self.lock:
            tensors = self._sampled(order)
        if self.fault == "swap-rows":
            tensors = self.exchange.swapped(order["prompt"], tensors)
        if self.fault == "nan":
            tensors["latents"] = tensors["latents"] * float("nan")
        if self.fault == "fewer-rows":
            del tensors["latents"]
        return tensors, told

    @torch.no_grad()
    def _sampled(self, order: Body) -> dict[str, Tensor]:
        schedule = self._schedule(order)
        params = self._params(order)
        pipeline = self.model.pipeline
        seed = secrets.randbelow(2**31) if self.fault == "ignore-seeds" else order["seed"]
        draws = seeded_draws(seed, order["shape"], 1 + len(schedule.stochastic))[None]
        scheduler = RecordingScheduler({}, schedule, draws, CPU)
        conditions = pipeline.encode([order["prompt"]], params)
        guidance = pipeline.facts.guidance_of(params)
        told = pipeline.facts.guidance_of(self._asked(order))
        for sigma in schedule.sigmas[:-1]:
            timestep = scheduler.exact_timestep(torch.tensor([sigma]) * schedule.timestep_scale)
            scheduler.note_guidance(told.scale_at(sigma))
            level = timestep / schedule.timestep_scale
            velocity = self.model.sign * pipeline.stage.velocity(scheduler.x, level, conditions, guidance)
            scheduler.step(velocity, timestep, scheduler.x)
        recording = scheduler.recording()
        return {
            "latents": recording.latents[0],
            "logp": recording.logp[0],
            "timesteps": recording.timesteps,
            "guidance_scales": recording.guidance_scales,
            "sigmas": recording.sigmas,
        }

    def _schedule(self, order: Body) -> Schedule:
        """The steps of a request, or others if it is to make a mistake."""
        schedule = Schedule.of(order)
        if self.fault == "other-sigmas":
            return replace(schedule, sigmas=tuple(sigma**0.9 for sigma in schedule.sigmas))
        if self.fault == "other-noise-scale":
            return replace(schedule, steps=tuple(replace(step, std=2 * step.std) for step in schedule.steps))
        if self.fault == "other-steps" and schedule.stochastic:
            first = schedule.stochastic[0]
            steps = [replace(s, std=0.0) if i == first else s for i, s in enumerate(schedule.steps)]
            return replace(schedule, steps=tuple(steps))
        return schedule

    def _params(self, order: Body) -> DiffusionSamplingParams:
        """The settings of a request, or others if it is to make a mistake."""
        asked = self._asked(order)
        return asked if self.fault != "other-guidance" else replace(asked, guidance_scale=1.0, guidance_scale_2=None)

    def _asked(self, order: Body) -> DiffusionSamplingParams:
        return DiffusionSamplingParams(
            kernel=EulerODE(),
            num_inference_steps=len(order["steps"]),
            height=order["height"],
            width=order["width"],
            num_frames=order["num_frames"],
            guidance_scale=order["guidance_scale"],
            guidance_scale_2=order["guidance_scale_2"],
            negative_prompt=order["negative_prompt"],
            max_sequence_length=order["max_sequence_length"],
        )

    # Weights

    def begin(self, name: str, adapter: Mapping[str, Any] | None) -> None:
        self.name, self.next_name, self.adapter, self.received = None, name, adapter, {}

    def open_buffer(self, handle: Mapping[str, Any]) -> None:
        self.reader.open_buffer(handle)

    def bucket(self, bucket: Mapping[str, Any], body: memoryview) -> None:
        tensors = self.reader.tensors(bucket, body)
        if self.fault == "wrong-dtype":
            tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        if self.adapter is not None:
            self.received |= {name: tensor.clone() for name, tensor in tensors.items()}
            return
        parameters = self.model.parameters()
        unknown = sorted(set(tensors) - set(parameters))
        if unknown:
            raise KeyError(f"{type(self.model.network).__name__} has no parameter for {unknown[0]}")
        self.received |= {name: parameters[name] for name in tensors}
        if not self._is_stale:
            with self.lock:
                self.model.store(tensors)

    @property
    def _is_stale(self) -> bool:
        return self.fault == "stale-weights" and self.num_transfers > 0

    def end(self) -> Mapping[str, Fingerprint]:
        if self.adapter is not None and not self._is_stale:
            with self.lock:
                self.model.load_adapter(self.received, self.adapter["r"], self.adapter["lora_alpha"])
        self.num_transfers += 1
        self.name = self.next_name
        return self.held()

    def held(self) -> Mapping[str, Fingerprint]:
        parameters = self.model.parameters()
        own = {name: name if self.adapter is None else adapter_parameter(name) for name in self.received}
        return fingerprints((name, parameters[key].data) for name, key in own.items())

    def weights(self) -> str | None:
        return self.name

    def sleep(self) -> None:
        self.is_asleep = True

    def wake_up(self) -> None:
        self.is_asleep = False


def broken(handler: Handler, fault: str | None) -> Handler:
    """The handler of /sample, every third answer of which is cut if the fault says so."""
    cut = {"half-answer": 0.5, "close": 0.0}.get(fault or "")
    counter = itertools.count(1)

    def answer(body: memoryview) -> WireReply:
        reply = handler(body)
        return replace(reply, cut=cut) if cut is not None and next(counter) % EVERY == 0 else reply

    return answer


def fake_vllm_omni(model: ServedModel, port: int, words: Sequence[str], fault: str | None) -> WireServer:
    """A server that answers while its `serve_forever` runs.

    Args:
        words: arguments of the real server, which are ignored.
        fault: a name of `FAULTS["vllm_omni"]`.
    """
    fake = FakeOmni(latent_model(model), model.path, fault)
    routes = dict(Wire(fake).routes())
    routes["POST", "/sample"] = broken(routes["POST", "/sample"], fault)
    return wire_server(port, without_weights(routes, fault))
