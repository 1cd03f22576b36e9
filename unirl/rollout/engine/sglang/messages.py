"""The messages of SGLang's diffusion server (0.5.23): the bodies of requests, and the parts of answers that are read.

Requests are JSON. The answer of /rollout/generate is MessagePack; a tensor in it is a safetensors file of one tensor.
sglang itself is not imported: its packages belong to the environment of the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from unirl.rollout.engine.serving.payloads import bytes_of, copied, pickled
from unirl.sde.kernels import CPSSDEStrategy, FlowSDEStrategy
from unirl.types.facts import LoraSpec
from unirl.types.sampling import DiffusionSamplingParams

Body = dict[str, object]
MODULE = "transformer"
"""The trained module, by the server's name."""
KERNELS: Mapping[type, str] = {FlowSDEStrategy: "sde", CPSSDEStrategy: "cps"}
"""Our kernels to the names of the same kernels in SGLang."""


# Answers


class WireTensor(msgspec.Struct):
    """A tensor: a safetensors file with the one tensor `t`."""

    data: bytes

    def tensor(self) -> Tensor:
        """The tensor. Raises ValueError for other bytes."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(self.data)["t"]
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"no safetensors file of one tensor: {error}") from error


class DitTrajectory(msgspec.Struct):
    """The trajectory of one sample, at the positions that were asked for. `sigmas` has all T + 1 levels."""

    latents: WireTensor
    timesteps: WireTensor
    sigmas: WireTensor


class Rollout(msgspec.Struct):
    """One sample in the answer of /rollout/generate."""

    prompt: str
    seed: int
    rollout_log_probs: WireTensor
    dit_trajectory: DitTrajectory


class DiffusionModelInfo(msgspec.Struct):
    """The model of a server."""

    model_path: str
    architectures: list[str]


# Requests


def generate(
    prompt: str,
    seed: int,
    params: DiffusionSamplingParams,
    positions: Sequence[int],
    device: str,
    max_sequence_length: int | None,
) -> Body:
    """The body of /rollout/generate for one sample.

    One sample a request: the noise of a step depends on the number of samples of a request, not only on its seed.

    Args:
        positions: those whose latents are returned.
        device: where the server draws noise: `cpu`, or `cuda`.
        max_sequence_length: absent for models whose length is fixed.
    """
    body: Body = {
        "prompt": prompt,
        "negative_prompt": params.negative_prompt,
        "seed": seed,
        "generator_device": device,
        "width": params.width,
        "height": params.height,
        "num_inference_steps": params.num_inference_steps,
        "num_outputs_per_prompt": 1,
        "guidance_scale": params.guidance_scale,
        "rollout": True,
        "rollout_debug_mode": False,
        "rollout_return_dit_trajectory": True,
        "rollout_return_step_indices": list(positions),
        "suppress_logs": True,
        **stochastic(params),
    }
    if max_sequence_length is not None:
        body["extra_sampling_params"] = {"max_sequence_length": max_sequence_length}
    return body


def stochastic(params: DiffusionSamplingParams) -> Body:
    """The part of a request about its stochastic steps."""
    if not params.sde_indices:
        return {"rollout_sde_type": "ode", "rollout_log_prob_no_const": True}
    kernel = params.kernel
    assert isinstance(kernel, FlowSDEStrategy | CPSSDEStrategy), "check_request comes first"
    return {
        "rollout_sde_type": KERNELS[type(kernel)],
        "rollout_noise_level": kernel.eta,
        "rollout_sde_step_indices": list(params.sde_indices),
    }


def weights_from_tensors(tensors: Mapping[str, Tensor]) -> Body:
    """The body of /update_weights_from_tensor. All ranks of the server read one payload."""
    payload = pickled(list(copied(tensors).items()))
    return {"serialized_named_tensors": [payload], "load_format": None, "target_modules": [MODULE]}


def weights_from_folder(folder: Path) -> Body:
    """The body of /update_weights_from_disk. The files below `folder` may have some of the module's tensors only."""
    return {"model_path": str(folder), "flush_cache": True, "target_modules": [MODULE]}


def adapter_from_tensors(tensors: Mapping[str, Tensor], spec: LoraSpec) -> Body:
    """The body of /update_weights_from_tensor for an adapter, which takes the place of the former one."""
    settings = {"weight_update_mode": "lora_merge", "lora_alpha": int(spec.alpha), "lora_rank": spec.rank}
    return {**weights_from_tensors(tensors), **settings}


def expected_tensors(hashes: Mapping[str, str]) -> Body:
    """The body of /update_weights_from_tensor_checker."""
    return {"target_module": MODULE, "expected_named_tensors_sha256": dict(hashes)}


def tensor_hash(tensor: Tensor) -> str:
    """The server's hash of a tensor: SHA-256 of its dtype, its shape and its bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)!r}".encode())
    digest.update(bytes_of(tensor))
    return digest.hexdigest()
