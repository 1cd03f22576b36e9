"""Sampling and its gradient as a plain float64 loop: the oracle of sampling with gradients, on the toy stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.noise import NoiseSource
from unirl.types.rollout_resp import RolloutTrack

Change = Callable[[int, Tensor], Tensor]


def as_it_is(step: int, value: Tensor) -> Tensor:
    return value


def by_prompt(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward whose gradient depends on the picture and on the prompt."""
    aims = torch.tensor([0.01 * sum(prompt.encode()) % 1.0 for prompt in prompts]).to(images)
    return -(images - aims.view(-1, *[1] * (images.dim() - 1))).square().flatten(1).mean(1)


def differentiable(stage: DiffusionStage, batch_size: int = 8) -> DifferentiableStage:
    """The stage with pictures that are the sine of latents."""
    return DifferentiableStage(stage, torch.sin, by_prompt, batch_size=batch_size)


def reward_of(x0: Tensor, track: RolloutTrack) -> Tensor:
    """[B] by definition."""
    return by_prompt(x0.sin(), track.prompts or [])


def in_double(stage: DiffusionStage) -> nn.Module:
    """The toy's network in float64."""
    assert isinstance(stage.denoiser, nn.Module)
    return copy.deepcopy(stage.denoiser).double()


def velocity(network: nn.Module, x: Tensor, sigma: float, track: RolloutTrack, scale: float = 1.0) -> Tensor:
    """The guided velocity."""

    def of(name: str) -> Tensor:
        pooled: Tensor = track.conditions[name].pooled.double()  # type: ignore[attr-defined]
        v: Tensor = network(x, torch.full((len(x),), sigma).double(), pooled)
        return v

    return of("text") if scale == 1.0 else of("negative_text") + scale * (of("text") - of("negative_text"))


def start_of(track: RolloutTrack) -> Tensor:
    """x_T."""
    segment = track.segment
    return NoiseSource(segment.seed, "r", segment.step).normal(track.sample_ids, "x", segment.final.shape[1:]).double()


def euler(
    network: nn.Module, track: RolloutTrack, *, keep: Change = as_it_is, enter: Change = as_it_is, scale: float = 1.0
) -> Tensor:
    """Euler's path to x_0; `keep` changes every velocity, `enter` every network input."""
    x, sigmas = start_of(track), track.segment.sigmas.double().tolist()
    for i in range(len(sigmas) - 1):
        x = x + (sigmas[i + 1] - sigmas[i]) * keep(i, velocity(network, enter(i, x), sigmas[i], track, scale))
    return x


def gradient_of(network: nn.Module, value: Tensor) -> Tensor:
    """The gradient of a scalar with respect to all weights, laid end to end."""
    return torch.cat([piece.flatten() for piece in torch.autograd.grad(value, list(network.parameters()))])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest entry, which is not tiny."""
    assert expected.abs().max() > 1e-6
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
