"""The policy of every denoising model: samples trajectories, and replays their steps under the current weights.

A family adds only a `Denoiser`, one forward of its network. The kernel defines a step; the algorithm weighs it.

    sample:  x_T --velocity, kernel--> x_{T-1} --> ... --> x_0     stores x_i and x_{i+1} of stochastic steps i, and x_0
    replay:  (x_i, x_{i+1}) of some steps --one forward--> log-prob, mean, velocity of each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.config.errors import IncompatibleError
from unirl.models.base import CanaryOutput, LatentCanaryInputs
from unirl.models.chunks import padded_rows, select_conditions
from unirl.models.denoising.step_cache import BlockChain, StepCache
from unirl.models.value_head import ValueHead, pooled_text
from unirl.sde.guidance import Network
from unirl.sde.kernels import EulerODE, predicted_x0
from unirl.sde.noise import NoiseSource, noise_ahead
from unirl.types.batch import take_rows
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.device import to_device
from unirl.types.facts import LatentFacts
from unirl.types.progress import progress
from unirl.types.protocols import TORCH_DTYPES, GuidanceLike, Kernel, Previous
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment, stored_positions

if TYPE_CHECKING:
    from jaxtyping import Float


class Denoiser(Protocol):
    """The network of a family as a velocity field, without guidance."""

    def velocity(
        self, x: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"], conditions: Conditions
    ) -> Float[Tensor, "B *latent"]:
        """v = eps - x0, [B, *latent] fp32, from x [B, *latent] fp32 and sigma [B] fp32: one forward."""


@runtime_checkable
class ExpertDenoiser(Denoiser, Protocol):
    """A network of several experts. A forward runs only the experts of the noise levels of its rows."""

    def velocity_at(
        self, x: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"], conditions: Conditions, levels: Sequence[float]
    ) -> Float[Tensor, "B *latent"]:
        """The velocity [B, *latent] where the host knows the noise levels, so that it does not wait for `sigma`.

        `sigma` holds `levels` once, or several times in a row.
        """

    def velocity_by_all(
        self, x: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"], conditions: Conditions
    ) -> Float[Tensor, "B *latent"]:
        """The same velocity [B, *latent] from a forward that runs every expert.

        Ranks that shard the weights gather them together, so all ranks must run the same experts. They do at noise
        levels that all rows share. If each row has its own level, they do only by running all experts.
        """


@runtime_checkable
class BlockwiseDenoiser(Denoiser, Protocol):
    """A denoiser whose networks are chains of blocks, which a step cache may leave out."""

    def block_chains(self) -> Sequence[Sequence[nn.Module]]:
        """The blocks of each network, in the order in which a forward calls them."""


@dataclass(frozen=True, kw_only=True)
class GradientMask:
    """Selects the sampling steps that are differentiated, and the paths of the gradient between them."""

    steps: tuple[int, ...] = ()
    """Steps whose velocity has a gradient to the weights. The velocity of all other steps is a constant."""
    through_inputs: bool = True
    """Gradients reach earlier steps also through the network's input. If False, only along x_{i+1} = a x_i + b v_i."""

    def velocity(
        self, step: int, network: Callable[[Tensor], Tensor], x: Float[Tensor, "B *latent"]
    ) -> Float[Tensor, "B *latent"]:
        """`network(x)`. If it has a gradient, only x is stored, and the backward pass repeats the forward."""
        if step not in self.steps:
            with torch.no_grad():
                return network(x)
        inputs = x if self.through_inputs else x.detach()
        v: Tensor = checkpoint(network, inputs, use_reentrant=False, preserve_rng_state=False)
        return v


NO_GRADIENT = GradientMask()


@dataclass(frozen=True)
class Replay:
    """Recorded steps under the current weights; S' is the number of replayed steps, in the requested order."""

    logp: Tensor  # [B, S'] nats, mean over latent elements
    mean: Tensor  # [B, S', *latent] fp32
    std: Tensor  # [S'] fp32
    velocity: Tensor  # [B, S', *latent] fp32

    @classmethod
    def of(
        cls,
        segment: LatentSegment,
        steps: Sequence[int],
        x: Float[Tensor, "S B *latent"],
        v: Float[Tensor, "S B *latent"],
    ) -> Replay:
        """The replay of `steps` from x and v [S, B, *latent], the states before the steps and their velocities."""
        levels = segment.sigmas.tolist()
        gaussians = [segment.kernel.transition(x[s], v[s], levels[i], levels[i + 1]) for s, i in enumerate(steps)]
        logp = [g.log_prob(segment.latents_at(i + 1).float()) for g, i in zip(gaussians, steps, strict=True)]
        return cls(
            logp=torch.stack(logp, 1),
            mean=torch.stack([g.mean for g in gaussians], 1),
            std=torch.stack([g.std for g in gaussians]).flatten(),
            velocity=v.transpose(0, 1),
        )


class DiffusionStage:
    """Samples and replays with one denoiser. The bits of a row do not depend on the other rows of its batch."""

    def __init__(self, denoiser: Denoiser, facts: LatentFacts, autocast_dtype: torch.dtype = torch.float32) -> None:
        self.denoiser = denoiser
        self.facts = facts
        self.autocast_dtype = autocast_dtype
        self.needs_autocast: Callable[[], bool] = lambda: True
        """False while the network computes in `autocast_dtype` by itself, so that autocast would only add casts."""
        self.value_head: ValueHead | None = None
        """Critic head created by the train backend. None unless `Needs.value` is set."""

    def build_value_head(self, width: int, seed: int) -> ValueHead:
        """A new value head for the latents and prompts of this model."""
        return ValueHead.of(self.facts, width, seed)

    def velocity(
        self,
        x: Float[Tensor, "B *latent"],
        sigma: Float[Tensor, "B"],
        conditions: Conditions,
        guidance: GuidanceLike,
    ) -> Float[Tensor, "B *latent"]:
        """The guided velocity [B, *latent] at x [B, *latent] and sigma [B]. Sigma may differ between rows and ranks."""
        rows = self._rows(len(x))
        feeds = self._feeds(conditions, rows, guidance)
        denoiser = self.denoiser
        network = denoiser.velocity_by_all if isinstance(denoiser, ExpertDenoiser) else denoiser.velocity
        return self._padded_forward(x, sigma, guidance, feeds, network)

    def sample(
        self,
        conditions: Conditions,
        x_T: Float[Tensor, "B *latent"],  # noqa: N803
        params: DiffusionSamplingParams,
        noise: NoiseSource,
        ids: Sequence[str],
        gradient: GradientMask = NO_GRADIENT,
        guidance: GuidanceLike | None = None,
    ) -> LatentSegment:
        """Trajectories from x_T [B, *latent], fp32 on the network's device, to x_0.

            for i in 0 ... T - 1:
                v = guided velocity at (x_i, sigma_i)
                x_{i+1} = sample of kernel(x_i, v), with its log-prob    if i is a stochastic step
                          mean of solver(x_i, v)                         otherwise

        The noise of stochastic step i is keyed by each row's id and the name `s{i}`. Stored latents are rounded to the
        trajectory dtype before anything is computed from them. With `params.cache_threshold`, steps that are neither
        stochastic nor differentiated may reuse blocks of earlier steps. Returns latents [B, K, *latent] at the K stored
        positions, and log-probs [B, S] of the S stochastic steps.

        Args:
            params: pinned, so that `sigmas` [T + 1] and `sde_indices` [S] are known.
            gradient: the steps that are differentiated; none by default.
            guidance: None uses the scales and passes of `params`.
        """
        sigmas, sde_indices = pinned_schedule(params)
        rows = self._rows(len(ids))
        guidance = guidance or self.facts.guidance_of(params)
        feeds = self._feeds(conditions, rows, guidance)
        positions = stored_positions(sde_indices, params.num_inference_steps)
        host_levels = sigmas.tolist()
        trajectory = Trajectory(params, guidance, host_levels, positions)
        levels = to_device(sigmas, x_T.device)[:, None].expand(-1, len(rows))
        x = trajectory.store(0, take_rows(x_T, rows).float())
        names = [f"s{i}" for i in sde_indices]
        cache = self._step_cache(params.cache_threshold)
        with cache.attached(), noise_ahead(noise, [ids[row] for row in rows], names, x_T.shape[1:]) as step_noise:
            for i in range(params.num_inference_steps):
                cache.begin_step(may_reuse=i not in sde_indices and i not in gradient.steps)
                network = self._network([host_levels[i]])
                forward = partial(self._forward, sigma=levels[i], guidance=guidance, feeds=feeds, network=network)
                v = gradient.velocity(i, forward, x)
                if i in sde_indices:
                    x = trajectory.stochastic(i, x, v, next(step_noise))
                else:
                    x = trajectory.deterministic(i, x, v)
                progress("denoising step", params.num_inference_steps)
        return trajectory.segment(len(ids), sigmas, sde_indices, noise, cache.skipped_share())

    def _step_cache(self, threshold: float | None) -> StepCache:
        """The cache of a sampling run. Raises IncompatibleError if the denoiser has no chains of blocks."""
        if threshold is None:
            return StepCache()
        if not isinstance(self.denoiser, BlockwiseDenoiser):
            raise IncompatibleError(
                f"sampling.cache_threshold={threshold:g} reuses blocks of the network, but "
                f"{type(self.denoiser).__name__} of {self.facts.family} does not name its blocks. Remove the key, or "
                "give the denoiser a method block_chains()"
            )
        return StepCache([BlockChain(blocks, threshold) for blocks in self.denoiser.block_chains()])

    def record(
        self, x0: Float[Tensor, "B *latent"], params: DiffusionSamplingParams, noise: NoiseSource
    ) -> LatentSegment:
        """A segment for samples x0 [B, *latent] that this policy did not generate. Only the last position is stored."""
        sigmas, _ = pinned_schedule(params)
        guidance = self.facts.guidance_of(params)
        trajectory = Trajectory(params, guidance, sigmas.tolist(), stored_positions((), params.num_inference_steps))
        trajectory.store(params.num_inference_steps, x0)
        return trajectory.segment(len(x0), sigmas, (), noise)

    def replay(self, conditions: Conditions, segment: LatentSegment, steps: Sequence[int]) -> Replay:
        """Log-prob [B, S'], mean and velocity [B, S', *latent] of the recorded stochastic `steps`, in one forward.

            v = guided velocity at (x_i, sigma_i), rows of all steps i in `steps` as one batch [S' B, *latent]
            logp_i = log N(x_{i+1}; kernel(x_i, v)), mean over latent elements

        Gradients flow if they are enabled. On unchanged weights logp equals `segment.logp`: bit for bit on a CPU, to
        rounding on a GPU.
        """
        batch = len(segment)
        rows = [row % batch for row in self._rows(batch * len(steps))]
        guidance = segment.guidance
        feeds = self._feeds(conditions, rows, guidance)
        x = torch.cat([segment.latents_at(step) for step in steps]).float()
        sigma = to_device(segment.sigmas[list(steps)], x.device).repeat_interleave(batch)
        levels = segment.sigmas.tolist()
        row_levels = [levels[steps[row // batch]] for row in self._rows(len(x))]
        v = self._padded_forward(x, sigma, guidance, feeds, self._network(row_levels))
        x, v = x.unflatten(0, (len(steps), batch)), v.unflatten(0, (len(steps), batch))
        return Replay.of(segment, steps, x, v)

    def values(self, conditions: Conditions, segment: LatentSegment, steps: Sequence[int]) -> Float[Tensor, "B S"]:
        """Values [B, S'] fp32 of the states before `steps`, in one forward of the value head."""
        assert self.value_head is not None, "a stack whose loss needs a value head provides it"
        x = torch.cat([segment.latents_at(step) for step in steps]).float()
        sigma = segment.sigmas[list(steps)].to(x.device).repeat_interleave(len(segment))
        text = pooled_text(conditions)
        values = self.value_head(x, sigma, None if text is None else text.repeat(len(steps), 1))
        return values.unflatten(0, (len(steps), len(segment))).transpose(0, 1)

    def canary(self, inputs: LatentCanaryInputs) -> CanaryOutput:
        """The velocity without guidance at `inputs`, which must be on the network's device."""
        return CanaryOutput(values=self.velocity(inputs.x, inputs.sigma, inputs.conditions, self.facts.guidance))

    def _feeds(self, conditions: Conditions, rows: list[int], guidance: GuidanceLike) -> tuple[Conditions, ...]:
        """The conditions of each forward pass, for the rows `rows`, without the padding of texts that no row needs."""
        feeds = guidance.feeds(select_conditions(conditions, rows))
        return tuple(
            {name: c.trimmed() if isinstance(c, TextEmbedCondition) else c for name, c in feed.items()}
            for feed in feeds
        )

    def _network(self, levels: Sequence[float]) -> Network:
        """The network at noise levels that the host knows; `sigma` repeats them."""
        denoiser = self.denoiser
        return (
            partial(denoiser.velocity_at, levels=levels) if isinstance(denoiser, ExpertDenoiser) else denoiser.velocity
        )

    def _rows(self, count: int) -> list[int]:
        return padded_rows(count, self.facts.batch_multiple)

    def _padded_forward(
        self,
        x: Tensor,
        sigma: Tensor,
        guidance: GuidanceLike,
        feeds: tuple[Conditions, ...],
        network: Network,
    ) -> Tensor:
        """The velocity at the rows of x, padded with copies to the batch multiple, as `feeds` is."""
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
        network: Network,
    ) -> Tensor:
        enabled = self.autocast_dtype != torch.float32 and self.needs_autocast()
        with torch.autocast(x.device.type, self.autocast_dtype, enabled=enabled):
            return guidance.velocity(network, x, sigma, feeds)


def pinned_schedule(params: DiffusionSamplingParams) -> tuple[Float[Tensor, "T1"], tuple[int, ...]]:
    """Sigmas [T + 1] float32 and stochastic steps of `params`. Raises ValueError if they are not pinned."""
    if params.sigmas is None or params.sde_indices is None:
        raise ValueError("sampling needs pinned parameters: call params.pinned(step, sigmas) first")
    without = [i for i in params.sde_indices if not params.kernel.has_density(i, params.num_inference_steps)]
    if without:
        raise ValueError(f"{type(params.kernel).__name__} has no density at steps {without}: they cannot be stochastic")
    return torch.tensor(params.sigmas, dtype=torch.float32), tuple(params.sde_indices)


class Trajectory:
    """One sampling run: takes steps, stores latents and log-probs, and keeps the history for multistep solvers."""

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

    def stochastic(
        self, i: int, x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"], noise: Float[Tensor, "B *latent"]
    ) -> Float[Tensor, "B *latent"]:
        """x_{i+1} [B, *latent], sampled from the kernel's Gaussian; stores its log-prob."""
        step = self.params.kernel.transition(x, v, self.sigmas[i], self.sigmas[i + 1])
        x_next = self.store(i + 1, step.sample(noise))
        with torch.no_grad():
            self.logp.append(step.log_prob(x_next))
        self.previous = None  # a stochastic step invalidates the history of a multistep solver
        return x_next

    def deterministic(
        self, i: int, x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"]
    ) -> Float[Tensor, "B *latent"]:
        """x_{i+1} [B, *latent], the mean of the solver's step."""
        sigma = self.sigmas[i]
        x_next = self.solver.transition(x, v, sigma, self.sigmas[i + 1], self.previous).mean
        if self.solver.multistep:
            self.previous = Previous(sigma, predicted_x0(x, v, sigma))
        return self.store(i + 1, x_next)

    def store(self, position: int, x: Float[Tensor, "B *latent"]) -> Float[Tensor, "B *latent"]:
        """`x` in fp32, stored and rounded to the trajectory dtype if `position` is one of the stored ones."""
        if position not in self.positions:
            return x
        self.latents.append(x.to(self.dtype))
        return self.latents[-1].float()

    def segment(
        self,
        count: int,
        sigmas: Float[Tensor, "T1"],
        sde_indices: tuple[int, ...],
        noise: NoiseSource,
        skipped_share: float | None = None,
    ) -> LatentSegment:
        """The segment of the first `count` rows, without padding rows."""
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
            skipped=None if skipped_share is None else torch.full((count,), skipped_share),
        )
