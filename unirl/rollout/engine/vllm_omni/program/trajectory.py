"""Samples a trajectory in place of the scheduler of a pipeline of vLLM-Omni, and records it.

The pipelines of vLLM-Omni return no trajectories, except that of BAGEL. All of them ask `scheduler.step` for the next
latents, so this scheduler makes the steps of the request: each is a Gaussian whose mean is linear in x and v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.sde.gaussian import Gaussian

TRAIN_TIMESTEPS = 1000
"""The timestep of noise level 1."""


def seeded_draws(seed: int, shape: Sequence[int], count: int) -> Tensor:
    """[count, *shape] fp32 on the CPU: the noise of a seed, first x_T, then that of each stochastic step."""
    return torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class StepWeights:
    """One step: x_next ~ N(on_x x + on_v v, std^2 I). A deterministic step has std 0."""

    on_x: float
    on_v: float
    std: float


@dataclass(frozen=True)
class Schedule:
    """The steps of a trajectory, as the request has them."""

    sigmas: tuple[float, ...]  # [T + 1]
    steps: tuple[StepWeights, ...]  # [T]
    positions: tuple[int, ...]
    """The positions whose latents are recorded."""
    dtype: str
    """The dtype to which latents are rounded after each step, before anything is computed from them."""
    timestep_scale: float = TRAIN_TIMESTEPS
    """The network gets timestep_scale * sigma as its timestep."""

    @classmethod
    def of(cls, order: Mapping[str, Any]) -> Schedule:
        """The schedule in the body of a request. Raises ValueError, KeyError or TypeError for another body."""
        steps = tuple(StepWeights(*(float(value) for value in step)) for step in order["steps"])
        sigmas = tuple(float(sigma) for sigma in order["sigmas"])
        positions = tuple(int(position) for position in order["positions"])
        if len(sigmas) != len(steps) + 1 or not all(0 <= position < len(sigmas) for position in positions):
            raise ValueError(f"{len(sigmas)} sigmas do not fit {len(steps)} steps and the positions {list(positions)}")
        return cls(sigmas, steps, positions, str(order["trajectory_dtype"]), float(order["timestep_scale"]))

    @property
    def stochastic(self) -> tuple[int, ...]:
        """The indices of the stochastic steps."""
        return tuple(index for index, step in enumerate(self.steps) if step.std > 0)


@dataclass(frozen=True)
class Recording:
    """The trajectories of a batch."""

    latents: Tensor  # [B, K, *latent] on the CPU
    logp: Tensor  # [B, S] nats, mean over latent elements
    timesteps: Tensor  # [T] those that the network was given, as 1000 sigma
    guidance_scales: Tensor  # [T] 1 where there was no guidance
    sigmas: Tensor  # [T + 1]


class RecordingScheduler:
    """The scheduler of a pipeline while it samples one batch. Latents are fp32 here, outside of the network's dtype.

    It keeps x itself: the pipeline's copy, and the timesteps that it computes, may be rounded to the network's dtype.
    """

    order = 1

    def __init__(self, config: Any, schedule: Schedule, draws: Tensor, device: torch.device) -> None:
        """
        Args:
            config: the settings of the scheduler that is replaced; pipelines read them.
            draws: [B, 1 + S, *latent] the noise of each row: x_T, then that of each stochastic step.
        """
        self.config = config
        self.schedule = schedule
        self.timesteps = torch.tensor(schedule.sigmas[:-1]) * TRAIN_TIMESTEPS
        self.sigmas = torch.tensor(schedule.sigmas)
        self.noise = draws.transpose(0, 1)
        self.rounded = getattr(torch, schedule.dtype)
        self.x = self._stored(self.noise[0].to(device))
        self.num_steps, self.num_draws = 0, 1
        self.given: list[float] = []
        self.scales: list[float] = []
        self.kept: list[Tensor] = []
        self.logps: list[Tensor] = []
        self._keep()

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
        **others: Any,
    ) -> None:
        """Ignore the schedule of the pipeline: that of the request is used."""
        if device is not None:
            self.timesteps = self.timesteps.to(device)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """The first step is always step 0."""

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """Flow models take latents as they are."""
        return sample

    def exact_timestep(self, given: Tensor) -> Tensor:
        """The timestep of the present step, fp32, for a network that was given one which may be rounded."""
        scale = self.schedule.timestep_scale
        timestep = (self.sigmas[self.num_steps] * scale).to(given.device)
        if not torch.allclose(given.float(), timestep, rtol=2**-7, atol=1e-6 * scale):
            raise RuntimeError(
                f"the pipeline gives its network the timesteps {given.flatten().tolist()} at step {self.num_steps}, "
                f"and that of the request is {float(timestep):g}"
            )
        self.given = [*self.given[: self.num_steps], float(timestep) / scale * TRAIN_TIMESTEPS]
        return timestep.expand(given.shape)

    def note_guidance(self, scale: float) -> None:
        """Record the guidance scale of the present step; 1 = without guidance."""
        self.scales = [*self.scales[: self.num_steps], scale]

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        """Make one step from the velocity [B, *latent]. Returns the next latents in the dtype of `sample`."""
        weights = self.schedule.steps[self.num_steps]
        mean = weights.on_x * self.x + weights.on_v * model_output.float()
        if weights.std > 0:
            gaussian = Gaussian(mean, torch.tensor(weights.std, device=mean.device), dense=True)
            self.x = self._stored(gaussian.sample(self.noise[self.num_draws]))
            self.logps.append(gaussian.log_prob(self.x).cpu())
            self.num_draws += 1
        else:
            self.x = self._stored(mean)
        self.num_steps += 1
        self._keep()
        return (self.x.to(sample.dtype),)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.rounded).float()

    def _keep(self) -> None:
        if self.num_steps in self.schedule.positions:
            self.kept.append(self.x.to("cpu", self.rounded))

    def recording(self) -> Recording:
        """The trajectories. Raises RuntimeError unless all steps were made."""
        if self.num_steps != len(self.schedule.steps):
            raise RuntimeError(f"the pipeline made {self.num_steps} of {len(self.schedule.steps)} steps")
        for what, noted in {"the network was called": self.given, "its guidance was seen": self.scales}.items():
            if len(noted) != self.num_steps:
                raise RuntimeError(f"{what} in {len(noted)} of {self.num_steps} steps")
        rows = len(self.x)
        logp = torch.stack(self.logps, 1) if self.logps else torch.zeros(rows, 0)
        told = torch.tensor(self.given), torch.tensor(self.scales)
        return Recording(torch.stack(self.kept, 1), logp, *told, self.sigmas)
