"""The policy of every denoising model, written once: sample a trajectory, replay its steps under the current weights.

A family adds a `Denoiser`: one forward of its network. How a step is taken is the kernel's business, how a loss weighs
it the algorithm's.

    sample:  x_T --v, kernel--> x_{T-1} --> ... --> x_0        store {i, i + 1 for stochastic i} and x_0
             (gradients through the steps that a mask names, else none)
    replay:  (x_i, x_{i+1}) of some steps, one forward --> log-prob, mean, velocity of each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unirl.models.base import CanaryOutput, LatentCanaryInputs
from unirl.models.chunks import padded_rows, select_conditions
from unirl.models.value_head import ValueHead, pooled_text
from unirl.sde.guidance import Network
from unirl.sde.kernels import EulerODE, predicted_x0
from unirl.sde.noise import NoiseAhead, NoiseSource
from unirl.types.conditions import Conditions
from unirl.types.facts import LatentFacts
from unirl.types.protocols import TORCH_DTYPES, GuidanceLike, Kernel, Previous
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment, stored_positions


class Denoiser(Protocol):
    """What a family writes: its network as a velocity field, without guidance."""

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v = eps - x0, [B, *latent] fp32, from x [B, *latent] fp32 and sigma [B] fp32: one forward."""
        ...


@runtime_checkable
class ExpertDenoiser(Denoiser, Protocol):
    """A network of several experts, of which a forward runs those that its rows' levels belong to."""

    def velocity_by_all(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """The same velocity from a forward that runs every expert.

        Ranks that share the weights gather them together, so they run the same experts. At levels that they share they
        do; where each row has a level of its own, they do only if all experts are run.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GradientMask:
    """Which steps of a sampling run are differentiated, and by which ways a gradient gets to them."""

    steps: tuple[int, ...] = ()
    """Steps whose velocity carries a gradient to the weights; the velocity of the others is a constant."""
    through_inputs: bool = True
    """Gradients go on through the network's input to earlier steps; else only along x_{i+1} = a x_i + b v_i."""

    def velocity(self, step: int, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`network(x)`. Where it carries a gradient, only x is kept, and the forward run again in the backward pass."""
        if step not in self.steps:
            with torch.no_grad():
                return network(x)
        inlet = x if self.through_inputs else x.detach()
        v: Tensor = checkpoint(network, inlet, use_reentrant=False, preserve_rng_state=False)
        return v


NO_GRADIENT = GradientMask()


@dataclass(frozen=True)
class Replay:
    """Recorded steps under the current weights; S' = the steps that were asked for, in that order."""

    logp: Tensor  # [B, S'] nats, mean over latent elements
    mean: Tensor  # [B, S', *latent] fp32
    std: Tensor  # [S'] fp32
    velocity: Tensor  # [B, S', *latent] fp32


class DiffusionStage:
    """Samples and replays with one denoiser. Rows are independent: a row's bits do not depend on its neighbours."""

    def __init__(self, denoiser: Denoiser, facts: LatentFacts, autocast_dtype: torch.dtype = torch.float32) -> None:
        self.denoiser = denoiser
        self.facts = facts
        self.autocast_dtype = autocast_dtype
        self.value_head: ValueHead | None = None
        """What a loss with a critic asks; a train backend's."""

    def build_value_head(self, width: int, seed: int) -> ValueHead:
        """A fresh value head for this model's latents and prompts."""
        return ValueHead.of(self.facts, width, seed)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions, guidance: GuidanceLike) -> Tensor:
        """The guided velocity [B, *latent] at x [B, *latent] and sigma [B], which ranks need not share."""
        rows = self._rows(len(x))
        feeds = guidance.feeds(select_conditions(conditions, rows))
        denoiser = self.denoiser
        network = denoiser.velocity_by_all if isinstance(denoiser, ExpertDenoiser) else denoiser.velocity
        return self._padded_forward(x, sigma, guidance, feeds, network)

    def sample(
        self,
        conditions: Conditions,
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        noise: NoiseSource,
        ids: Sequence[str],
        gradient: GradientMask = NO_GRADIENT,
        guidance: GuidanceLike | None = None,
    ) -> LatentSegment:
        """The trajectories that start at x_T [B, *latent] (fp32, on the network's device); `params` is pinned.

        Noise of stochastic step i is the draw `s{i}` of each row's id. Stored positions are rounded to the trajectory
        dtype before anything is computed from them. The latents carry the gradients that `gradient` asks for.

        Args:
            guidance: absent = what `params` say of scales and passes.
        """
        sigmas, sde_indices = pinned_schedule(params)
        rows = self._rows(len(ids))
        guidance = guidance or self.facts.guidance_of(params)
        feeds = guidance.feeds(select_conditions(conditions, rows))
        steps = _Steps(params, guidance, sigmas.tolist(), stored_positions(sde_indices, params.num_inference_steps))
        levels = sigmas.to(x_T.device)[:, None].expand(-1, len(rows))
        x = steps.keep(0, x_T[rows].float())
        draws = NoiseAhead(noise, [ids[row] for row in rows], [f"s{i}" for i in sde_indices], x_T.shape[1:])
        with draws:
            for i in range(params.num_inference_steps):
                v = gradient.velocity(i, partial(self._forward, sigma=levels[i], guidance=guidance, feeds=feeds), x)
                x = steps.stochastic(i, x, v, next(draws)) if i in sde_indices else steps.deterministic(i, x, v)
        return steps.segment(len(ids), sigmas, sde_indices, noise)

    def record(self, x0: Tensor, params: DiffusionSamplingParams, noise: NoiseSource) -> LatentSegment:
        """Samples x0 [B, *latent] that came from elsewhere: a trajectory of which nothing but its end is known."""
        sigmas, _ = pinned_schedule(params)
        guidance = self.facts.guidance_of(params)
        steps = _Steps(params, guidance, sigmas.tolist(), stored_positions((), params.num_inference_steps))
        steps.keep(params.num_inference_steps, x0)
        return steps.segment(len(x0), sigmas, (), noise)

    def replay(self, conditions: Conditions, segment: LatentSegment, steps: Sequence[int]) -> Replay:
        """Log-prob, mean and velocity of the recorded stochastic `steps`, all of them in one forward.

        With gradients if these are enabled. On unchanged weights the log-prob equals `segment.logp`, bit for bit where
        the family's batch multiple holds.
        """
        batch = len(segment)
        rows = [row % batch for row in self._rows(batch * len(steps))]
        guidance = segment.guidance
        feeds = guidance.feeds(select_conditions(conditions, rows))
        x = torch.cat([segment.latents_at(step) for step in steps]).float()
        sigma = segment.sigmas[list(steps)].to(x.device).repeat_interleave(batch)
        v = self._padded_forward(x, sigma, guidance, feeds)
        return _densities(segment, steps, x.unflatten(0, (len(steps), batch)), v.unflatten(0, (len(steps), batch)))

    def values(self, conditions: Conditions, segment: LatentSegment, steps: Sequence[int]) -> Tensor:
        """[B, S'] fp32 what the value head says of the states before `steps`, all of them in one forward."""
        assert self.value_head is not None, "a stack whose loss needs a value head provides it"
        x = torch.cat([segment.latents_at(step) for step in steps]).float()
        sigma = segment.sigmas[list(steps)].to(x.device).repeat_interleave(len(segment))
        text = pooled_text(conditions)
        said = self.value_head(x, sigma, None if text is None else text.repeat(len(steps), 1))
        return said.unflatten(0, (len(steps), len(segment))).transpose(0, 1)

    def canary(self, inputs: LatentCanaryInputs) -> CanaryOutput:
        """The velocity without guidance at `inputs`, which are on the network's device."""
        return CanaryOutput(values=self.velocity(inputs.x, inputs.sigma, inputs.conditions, self.facts.guidance))

    def _rows(self, count: int) -> list[int]:
        return padded_rows(count, self.facts.batch_multiple)

    def _padded_forward(
        self,
        x: Tensor,
        sigma: Tensor,
        guidance: GuidanceLike,
        feeds: tuple[Conditions, ...],
        network: Network | None = None,
    ) -> Tensor:
        """The velocity of `x`'s rows, run among copies when they are fewer than `feeds` has."""
        rows = self._rows(len(x))
        if len(rows) == len(x):
            return self._forward(x, sigma, guidance, feeds, network)
        return self._forward(x[rows], sigma[rows], guidance, feeds, network)[: len(x)]

    def _forward(
        self,
        x: Tensor,
        sigma: Tensor,
        guidance: GuidanceLike,
        feeds: tuple[Conditions, ...],
        network: Network | None = None,
    ) -> Tensor:
        with torch.autocast(x.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32):
            return guidance.velocity(network or self.denoiser.velocity, x, sigma, feeds)


def pinned_schedule(params: DiffusionSamplingParams) -> tuple[Tensor, tuple[int, ...]]:
    """Sigmas [T + 1] float32 and stochastic steps of pinned `params`. Raises ValueError when they are not pinned."""
    if params.sigmas is None or params.sde_indices is None:
        raise ValueError("sampling needs pinned parameters: call params.pinned(step, sigmas) first")
    without = [i for i in params.sde_indices if not params.kernel.has_density(i, params.num_inference_steps)]
    if without:
        raise ValueError(f"{type(params.kernel).__name__} has no density at steps {without}: they cannot be stochastic")
    return torch.tensor(params.sigmas, dtype=torch.float32), tuple(params.sde_indices)


class _Steps:
    """The steps of one sampling run: what they keep, and the history that a multistep solver reads."""

    def __init__(
        self, params: DiffusionSamplingParams, guidance: GuidanceLike, sigmas: list[float], positions: tuple[int, ...]
    ) -> None:
        self.params = params
        self.guidance = guidance
        self.sigmas = sigmas
        self.positions = positions
        self.solver: Kernel = params.solver or EulerODE()
        self.dtype = TORCH_DTYPES[params.trajectory_dtype]
        self.previous: Previous | None = None
        self.latents: list[Tensor] = []
        self.logp: list[Tensor] = []

    def stochastic(self, i: int, x: Tensor, v: Tensor, noise: Tensor) -> Tensor:
        """The point after step i, drawn from the kernel's Gaussian, and its log-prob kept."""
        step = self.params.kernel.transition(x, v, self.sigmas[i], self.sigmas[i + 1])
        x_next = self.keep(i + 1, step.sample(noise))
        with torch.no_grad():
            self.logp.append(step.log_prob(x_next))
        self.previous = None  # a jump breaks the solver's history
        return x_next

    def deterministic(self, i: int, x: Tensor, v: Tensor) -> Tensor:
        """The point after step i of the solver."""
        sigma = self.sigmas[i]
        x_next = self.solver.transition(x, v, sigma, self.sigmas[i + 1], self.previous).mean
        if self.solver.multistep:
            self.previous = Previous(sigma, predicted_x0(x, v, sigma))
        return self.keep(i + 1, x_next)

    def keep(self, position: int, x: Tensor) -> Tensor:
        """`x` in fp32; rounded to the trajectory dtype if this position is stored."""
        if position not in self.positions:
            return x
        self.latents.append(x.to(self.dtype))
        return self.latents[-1].float()

    def segment(self, count: int, sigmas: Tensor, sde_indices: tuple[int, ...], noise: NoiseSource) -> LatentSegment:
        """What was kept of the first `count` rows."""
        latents = torch.stack([x[:count] for x in self.latents], dim=1)
        logp = (
            torch.stack([p[:count] for p in self.logp], dim=1)
            if self.logp
            else latents.new_zeros((count, 0), dtype=torch.float32)
        )
        return LatentSegment(
            latents=latents,
            indices=self.positions,
            sde_indices=sde_indices,
            sigmas=sigmas,
            logp=logp,
            kernel=self.params.kernel,
            solver=self.params.solver,
            init_same_noise=self.params.init_same_noise,
            guidance=self.guidance,
            seed=noise.seed,
            step=noise.step,
            anchors={},
        )


def _densities(segment: LatentSegment, steps: Sequence[int], x: Tensor, v: Tensor) -> Replay:
    """The kernel's densities at x, v [S', B, *latent]."""
    sigmas = segment.sigmas.tolist()
    logp, means, stds = [], [], []
    for s, i in enumerate(steps):
        step = segment.kernel.transition(x[s], v[s], sigmas[i], sigmas[i + 1])
        logp.append(step.log_prob(segment.latents_at(i + 1).float()))
        means.append(step.mean)
        stds.append(step.std)
    return Replay(torch.stack(logp, 1), torch.stack(means, 1), torch.stack(stds).flatten(), v.transpose(0, 1))
