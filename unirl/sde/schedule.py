"""Sigma schedules: the noise levels of a trajectory from 1 (noise) to 0 (clean), as each model defines them.

A schedule is computed once in float64 and rounded once to float32. Every engine and every replay uses that tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor

from unirl.sde.kernels import check_choice
from unirl.types.protocols import SigmaGrid

if TYPE_CHECKING:
    from jaxtyping import Float

Dynamic = Literal["off", "exponential", "linear"]
MuRule = Literal["line", "flux2"]

NUM_TRAIN_TIMESTEPS = 1000
"""The training grid of diffusers' flow schedulers; its finest level is 1 / 1000."""


def static_shift(tau: float, shift: float) -> float:
    """shift tau / (1 + (shift - 1) tau). Esser et al. 2024, eq. 23 (arXiv:2403.03206)."""
    return shift * tau / (1.0 + (shift - 1.0) * tau)


def flux2_mu(image_seq_len: int, num_inference_steps: int) -> float:
    """The empirical mu of FLUX.2: one line for 200 steps and one for 10, linear in the number of steps."""
    at_200 = 0.00016927 * image_seq_len + 0.45666666
    if image_seq_len > 4300:
        return at_200
    at_10 = 8.73809524e-05 * image_seq_len + 1.89833333
    return at_200 + (at_200 - at_10) / 190.0 * (num_inference_steps - 200)


def even_grid(num_inference_steps: int, last: float) -> list[float]:
    """T evenly spaced numbers from 1 down to `last`."""
    gaps = max(num_inference_steps - 1, 1)
    return [1.0 + (last - 1.0) * i / gaps for i in range(num_inference_steps)]


@dataclass(frozen=True, kw_only=True)
class SigmaSchedule:
    """The sigma schedule of a model. Names follow diffusers' `FlowMatchEulerDiscreteScheduler`."""

    shift: float = 1.0
    """Static shift, used if `dynamic` is off: 3 for SD3, 5 for Wan 2.1 and HunyuanVideo."""
    dynamic: Dynamic = "off"
    """Form of a shift that depends on the size of the image through mu."""
    mu: MuRule = "line"
    """`line` through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift), or the empirical `flux2`."""
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    """If set, the levels are stretched so that the last one above 0 is this; absent or 0 = no stretch."""
    grid: SigmaGrid = "clean"
    """Levels before the shift. `clean` has 1 - i / T. `diffusers` ends at the finest training level, which is already
    shifted and so is shifted twice: diffusers does this if it gets no sigmas, and the published SD3 runs of Flow-GRPO
    used it. `unipc` has T + 1 levels from 1 to 1 / 1000 and sets the last one to 0: `UniPCMultistepScheduler` of
    diffusers with flow sigmas (Wan). That scheduler lowers a first level of 1 by 1e-6 to avoid log 0; ours is 1."""

    def __post_init__(self) -> None:
        check_choice("SigmaSchedule.dynamic", self.dynamic, get_args(Dynamic))
        check_choice("SigmaSchedule.mu", self.mu, get_args(MuRule))
        check_choice("SigmaSchedule.grid", self.grid, get_args(SigmaGrid))
        if not 0.0 < self.shift < math.inf:
            raise ValueError(f"SigmaSchedule.shift={self.shift} must be a positive number; 1 = no shift")
        if self.base_image_seq_len == self.max_image_seq_len:
            raise ValueError(
                f"SigmaSchedule: base_image_seq_len and max_image_seq_len are both {self.max_image_seq_len}; "
                "the line for mu needs two different points"
            )
        if self.shift_terminal and not 0.0 < self.shift_terminal < 1.0:
            raise ValueError(
                f"SigmaSchedule.shift_terminal={self.shift_terminal} must lie in (0, 1), or be 0 for no stretch"
            )

    @classmethod
    def from_diffusers(cls, config: Mapping[str, object], *, grid: SigmaGrid = "clean") -> SigmaSchedule:
        """The schedule of a config of `FlowMatchEulerDiscreteScheduler`, or of UniPC with flow sigmas (grid `unipc`).

        Raises ValueError for an option that `SigmaSchedule` does not have.
        """
        for option in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas"):
            if config.get(option):
                raise ValueError(f"the scheduler config sets {option}, which SigmaSchedule does not support; unset it")
        timesteps = config.get("num_train_timesteps", NUM_TRAIN_TIMESTEPS)
        if timesteps != NUM_TRAIN_TIMESTEPS:
            raise ValueError(
                f"the scheduler config has num_train_timesteps={timesteps}; only {NUM_TRAIN_TIMESTEPS} is supported"
            )
        known = {field.name for field in fields(cls)} - {"dynamic", "mu", "grid"}
        values = {name: value for name, value in config.items() if name in known}
        if "use_flow_sigmas" in config:
            check_flow_sigmas(config)
            grid, values["shift"] = "unipc", config.get("flow_shift", 1.0)
        dynamic = config.get("time_shift_type", "exponential") if config.get("use_dynamic_shifting") else "off"
        return cls(dynamic=dynamic, grid=grid, **values)  # type: ignore[arg-type]  # checked by __post_init__

    def on_grid(self, grid: SigmaGrid) -> Self:
        """The same schedule with other levels before the shift."""
        return replace(self, grid=grid)

    def sigmas(
        self, num_inference_steps: int, image_seq_len: int | None = None
    ) -> Float[Tensor, "{num_inference_steps}+1"]:
        """Decreasing sigmas, float32 on the CPU; the last is exactly 0. A dynamic schedule needs `image_seq_len`."""
        if num_inference_steps < 1:
            raise ValueError(f"num_inference_steps={num_inference_steps} must be >= 1")
        levels = [self._shift(tau, num_inference_steps, image_seq_len) for tau in self._grid(num_inference_steps)]
        if self.shift_terminal:
            if len(levels) == 1:
                raise ValueError(
                    f"shift_terminal={self.shift_terminal} is not possible with num_inference_steps=1: "
                    "the only level is 1. Use at least 2 steps, or shift_terminal=0"
                )
            scale = (1.0 - levels[-1]) / (1.0 - self.shift_terminal)  # as Qwen-Image does
            levels = [1.0 - (1.0 - level) / scale for level in levels]
        return torch.tensor([*levels, 0.0], dtype=torch.float64).to(torch.float32)

    def mu_at(self, num_inference_steps: int, image_seq_len: int | None) -> float:
        """The mu of a dynamic schedule."""
        if image_seq_len is None:
            raise ValueError(f"dynamic={self.dynamic!r} needs image_seq_len, the number of image tokens")
        if self.mu == "flux2":
            return flux2_mu(image_seq_len, num_inference_steps)
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return self.base_shift + slope * (image_seq_len - self.base_image_seq_len)

    def _grid(self, num_inference_steps: int) -> list[float]:
        """T levels before the shift, starting at 1."""
        if self.grid == "clean":
            return even_grid(num_inference_steps, 1.0 / num_inference_steps)
        finest = 1.0 / NUM_TRAIN_TIMESTEPS
        if self.grid == "unipc":
            return even_grid(num_inference_steps + 1, finest)[:-1]
        return even_grid(num_inference_steps, static_shift(finest, self.shift) if self.dynamic == "off" else finest)

    def _shift(self, tau: float, num_inference_steps: int, image_seq_len: int | None) -> float:
        """A static shift, of `shift` or of e^mu (exponential, as in FLUX) or mu (linear) of a dynamic schedule."""
        if self.dynamic == "off":
            return static_shift(tau, self.shift)
        mu = self.mu_at(num_inference_steps, image_seq_len)
        shift = math.exp(mu) if self.dynamic == "exponential" else mu
        return shift / (shift + (1.0 / tau - 1.0))  # equals static_shift, with the rounding of diffusers


def check_flow_sigmas(config: Mapping[str, object]) -> None:
    """Raises ValueError unless the config of a multistep scheduler is for a flow that ends at 0."""
    required = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "final_sigmas_type": "zero"}
    for option, value in required.items():
        actual = config.get(option, value)
        if actual != value:
            raise ValueError(
                f"the scheduler config has {option}={actual!r}, but SigmaSchedule is for flows that end at 0: "
                f"set it to {value!r}"
            )
