"""The messages of the server: the bodies of requests, and the parts of answers that are read. See program/wire.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from unirl.rollout.engine.serving.latent_server import LatentRequest
from unirl.rollout.engine.vllm_omni.families import OmniFamily
from unirl.rollout.engine.vllm_omni.program.trajectory import StepWeights
from unirl.sde.kernels import EulerODE, LinearKernel
from unirl.types.facts import LatentFacts, LoraSpec
from unirl.types.protocols import TORCH_DTYPES
from unirl.types.sampling import DiffusionSamplingParams

Body = dict[str, object]


class OmniInfo(msgspec.Struct):
    """The settings of a server."""

    engine: str
    version: str
    pipeline: str
    model: str
    dtype: str
    can_sleep: bool


class OmniWeights(msgspec.Struct):
    """The name of the weights of a server. Null: a transfer is under way."""

    weights: str | None


class SampleFacts(msgspec.Struct):
    """The part of an answer to /sample that is no tensor."""

    id: str
    prompt: str
    weights: str


def order(
    request: LatentRequest,
    params: DiffusionSamplingParams,
    positions: Sequence[int],
    facts: LatentFacts,
    family: OmniFamily,
    max_sequence_length: int,
) -> Body:
    """The body of /sample. The server knows no kernels: each step has the weights of its mean, and its std.

    Args:
        positions: those whose latents are returned.
    """
    assert params.sigmas is not None
    return {
        "id": request.id,
        "prompt": request.prompt or family.blank,
        "negative_prompt": params.negative_prompt or family.blank,
        "seed": request.seed,
        "height": params.height,
        "width": params.width,
        "num_frames": params.num_frames,
        "shape": list(facts.latent_shape(params)),
        "token_side": family.token_side,
        "timestep_scale": facts.timestep_scale,
        "sigmas": list(params.sigmas),
        "steps": [[step.on_x, step.on_v, step.std] for step in steps_of(params)],
        "positions": list(positions),
        "trajectory_dtype": str(TORCH_DTYPES[params.trajectory_dtype]).removeprefix("torch."),
        "guidance_scale": params.guidance_scale,
        "guidance_scale_2": params.guidance_scale_2,
        "max_sequence_length": max_sequence_length,
    }


def steps_of(params: DiffusionSamplingParams) -> list[StepWeights]:
    """The steps of pinned settings: that of the kernel where it is stochastic, else the Euler step."""
    assert params.sigmas is not None and params.sde_indices is not None, "a request is pinned"
    kernel = params.kernel
    assert isinstance(kernel, LinearKernel), "check_request comes first"
    levels = list(zip(params.sigmas, params.sigmas[1:], strict=False))
    chosen = [kernel if i in params.sde_indices else EulerODE() for i in range(len(levels))]
    return [step_weights(each, *pair) for each, pair in zip(chosen, levels, strict=True)]


def step_weights(kernel: LinearKernel, sigma: float, sigma_next: float) -> StepWeights:
    """The mean of a kernel's step as weights of x and v, from (1 - sigma_next) x0 + c noise."""
    c, std = kernel.coefficients(sigma, sigma_next)
    excess = c - sigma_next
    return StepWeights(1.0 + excess, (sigma_next - sigma) + excess * (1.0 - sigma), std)


def begin(name: str, spec: LoraSpec | None) -> Body:
    """The body of /weights/begin.

    Args:
        spec: the adapters that are sent. None: whole weights.
    """
    if spec is None:
        return {"name": name, "adapter": None}
    return {"name": name, "adapter": {"r": spec.rank, "lora_alpha": spec.alpha}}


def entries(tensors: Mapping[str, Tensor], alignment: int) -> tuple[list[tuple[str, str, list[int], int]], int]:
    """(name, dtype, shape, offset) of tensors in one buffer, and its size in bytes."""
    result, size = [], 0
    for name, tensor in tensors.items():
        result.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
        size += -(-tensor.nbytes // alignment) * alignment
    return result, size
