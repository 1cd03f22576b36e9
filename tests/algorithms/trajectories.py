"""Trajectories of small random policies, and everything that papers' equations speak of, in float64 by their formulas.

The kernel is Flow-SDE, written here a second time: s = eta sqrt(sigma / (1 - sigma)), mean = x + [v + s^2 / (2 sigma)
(x + (1 - sigma) v)] dt, std = s sqrt(-dt), with 1 - sigma taken at the next level where sigma is 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.shared.denoising import DenoisingLoss
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import ToyDenoiser, toy_conditions, toy_denoiser, toy_facts, toy_params
from unirl.types.protocols import Kernel, TrainingProgress
from unirl.types.results import merge, values
from unirl.types.rollout_resp import RolloutTrack

IMAGE, VIDEO = (3, 4, 4), (3, 2, 4, 4)
ETA = 0.7
ROWS = 6


@dataclass(frozen=True)
class Policies:
    """The policy that is trained, the one that sampled, and the one at initialisation."""

    new: DiffusionStage
    old: DiffusionStage
    reference: DiffusionStage


def policies(latent: tuple[int, ...], distance: float = 0.02) -> Policies:
    """Three random networks a small distance apart."""
    base = toy_denoiser(latent_size=math.prod(latent))
    return Policies(*(DiffusionStage(nudged(base, seed, distance), toy_facts()) for seed in range(3)))


def nudged(denoiser: ToyDenoiser, seed: int, distance: float) -> ToyDenoiser:
    other, generator = copy.deepcopy(denoiser), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += distance * torch.randn(parameter.shape, generator=generator)
    return other


def trajectory(stage: DiffusionStage, latent: tuple[int, ...], kernel: Kernel | None = None) -> RolloutTrack:
    """A rollout of `stage`: 6 rows of other prompts, 5 steps of which 0, 1 and 3 are stochastic, random advantages."""
    ids, params = [f"row{i}" for i in range(ROWS)], toy_params(kernel or FlowSDEStrategy(eta=ETA))
    conditions, noise = toy_conditions(ids), NoiseSource(0, "r", 0)
    with torch.no_grad():
        segment = stage.sample(conditions, noise.normal(ids, "x", latent), params, noise, ids)
    return RolloutTrack(
        sample_ids=ids,
        group_ids=["group"] * ROWS,
        conditions=conditions,
        segment=segment,
        advantages=torch.randn(ROWS, generator=torch.Generator().manual_seed(0)),
        weight=torch.ones(ROWS),
        weight_version=torch.zeros(ROWS, dtype=torch.int64),
    )


def anchored(algorithm: DenoisingLoss, named: Policies, track: RolloutTrack) -> RolloutTrack:
    """The track with the anchors that the stack would fill: live ones by the old policy."""
    for snapshot, stage in (("live", named.old), ("reference", named.reference)):
        if snapshot in {anchor.snapshot for anchor in algorithm.anchors().values()}:
            segment, _ = algorithm.prepare_segment(stage, track, snapshot)
            track = track.replace(segment=segment)
    return track


@dataclass(frozen=True)
class LossAndGradient:
    """The sum of a loss over rows and steps, its gradient, and its metrics."""

    loss: float
    gradient: Tensor  # of all parameters, end to end
    metrics: dict[str, float]


def loss_and_gradient(
    algorithm: DenoisingLoss, stage: DiffusionStage, track: RolloutTrack, now: TrainingProgress | None = None
) -> LossAndGradient:
    """Loss and gradient of a track by the code under test, called as the stack calls it."""
    parameters, losses = list(stage.denoiser.parameters()), []  # type: ignore[attr-defined]
    stage.denoiser.zero_grad()  # type: ignore[attr-defined]

    def backward(loss: Tensor, last: bool) -> None:
        losses.append(loss.item())
        loss.backward()

    metrics = algorithm.compute_loss_and_backward(stage, track, backward, now or TrainingProgress())
    return LossAndGradient(sum(losses), torch.cat([p.grad.flatten() for p in parameters]), values(merge([metrics])))


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a policy at a recorded step."""

    logp: Tensor  # [B] by torch.distributions.Normal, mean over latent elements
    mean: Tensor  # [B, *latent]
    v: Tensor  # [B, *latent]


@dataclass(frozen=True)
class Step:
    """A recorded step as the papers see it."""

    new: StepOutputs
    old: StepOutputs
    reference: StepOutputs
    x_next: Tensor
    advantages: Tensor  # [B]
    dt: float  # negative
    s: float
    std: float


def mean_of(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


def expected(named: Policies, track: RolloutTrack, losses: Callable[[Step], Tensor]) -> LossAndGradient:
    """Loss and gradient of a track by an equation that gives a loss per row and step, in float64."""
    nets = [copy.deepcopy(stage.denoiser).double() for stage in (named.new, named.old, named.reference)]  # type: ignore[attr-defined]
    segment = track.segment
    total = torch.zeros((), dtype=torch.float64)
    for i in segment.sde_indices:
        sigma, sigma_next = segment.sigmas[i].item(), segment.sigmas[i + 1].item()
        dt, s = sigma_next - sigma, ETA * math.sqrt(sigma / (1 - (sigma_next if sigma == 1 else sigma)))
        std = s * math.sqrt(-dt)
        x, x_next = segment.latents_at(i).double(), segment.latents_at(i + 1).double()
        said = []
        for net in nets:
            v = net(x, torch.full((len(x),), sigma, dtype=torch.float64), track.conditions["text"].pooled.double())
            mean = x + (v + s**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
            said.append(StepOutputs(mean_of(torch.distributions.Normal(mean, std).log_prob(x_next)), mean, v))
        advantages = track.advantages.double()  # type: ignore[union-attr]
        total = total + losses(Step(*said, x_next=x_next, advantages=advantages, dt=dt, s=s, std=std)).sum()
    total.backward()
    return LossAndGradient(total.item(), torch.cat([p.grad.flatten() for p in nets[0].parameters()]), {})


def assert_same(have: LossAndGradient, want: LossAndGradient) -> None:
    """Loss and gradient agree, but for float32."""
    assert abs(have.loss - want.loss) <= 1e-5 * max(1.0, abs(want.loss))
    error = (have.gradient.double() - want.gradient).abs().max() / want.gradient.abs().max()
    assert error < 1e-5, f"the gradient is off by {error:.1e} of its largest entry"
