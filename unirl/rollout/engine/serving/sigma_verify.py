"""Compares the settings that a server says it sampled with, with those of the request.

Replay computes log-probs at the noise levels of the request. A server that samples at other ones, because it shifts its
schedule in another way, gives samples of another policy, and the loss would not show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.config.errors import SamplingMismatchError
from unirl.types.protocols import GuidanceLike
from unirl.types.sampling import DiffusionSamplingParams

TRAIN_TIMESTEPS = 1000
"""The timestep of noise level 1, as schedulers of flow models count."""
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Two noise levels are equal if they differ by at most ABSOLUTE + RELATIVE times the wanted one."""


@dataclass(frozen=True)
class UsedSettings:
    """The settings that a server says it sampled a trajectory with."""

    sigmas: Sequence[float]
    """T + 1 noise levels."""
    timesteps: Mapping[int, float]
    """Position of the trajectory to its timestep, which is TRAIN_TIMESTEPS times its noise level."""
    sde_indices: Sequence[int]
    """The stochastic steps."""
    guidance_scales: Sequence[float] | None
    """The scale of each step. None: it does not say; `LatentServingEngine` measures the effect of guidance."""


def verify_used(who: str, params: DiffusionSamplingParams, guidance: GuidanceLike, used: UsedSettings) -> None:
    """Raises SamplingMismatchError, with both lists, unless the settings used are those of the request.

    Args:
        who: the subject of the message, such as `SGLang, for r0:1`.
        params: pinned.
        guidance: that of the model, at the scales of `params`.
    """
    assert params.sigmas is not None and params.sde_indices is not None, "a request is pinned"
    _compare(
        who,
        "noise levels (sigmas)",
        used.sigmas,
        params.sigmas,
        "sampling.sigmas, sampling.sigma_grid, the shift of the scheduler",
    )
    wanted = [TRAIN_TIMESTEPS * params.sigmas[position] for position in used.timesteps]
    _compare(who, "timesteps", list(used.timesteps.values()), wanted, "the scheduler of the checkpoint")
    _compare(who, "stochastic steps", used.sde_indices, params.sde_indices, "sampling.sde_steps")
    if used.guidance_scales is not None:
        scales = [guidance.scale_at(sigma) for sigma in params.sigmas[:-1]]
        _compare(who, "guidance scales", used.guidance_scales, scales, "sampling.guidance_scale, guidance_scale_2")


def _compare(who: str, what: str, used: Sequence[float], wanted: Sequence[float], cause: str) -> None:
    are_equal = len(used) == len(wanted) and all(
        abs(a - b) <= ABSOLUTE + RELATIVE * abs(b)  # False for NaN
        for a, b in zip(used, wanted, strict=True)
    )
    if not are_equal:
        raise SamplingMismatchError(
            f"{who}: the {what} used are {shown(used)}, and the request has {shown(wanted)}. The trainer would replay "
            f"other steps than those that were sampled. Compare {cause}: trainer and server need the same"
        )


def shown(values: Sequence[float]) -> str:
    """Numbers with six digits: [1, 0.857692, 0]."""
    return f"[{', '.join(f'{value:.6g}' for value in values)}]"
