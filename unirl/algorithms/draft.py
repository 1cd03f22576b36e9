"""DRaFT: the gradient of the reward through the last K denoising steps, or through all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.algorithms.shared.reward_backprop import RewardBackprop
from unirl.sde.steps import LastSteps
from unirl.types.protocols import StepChoice


@dataclass(frozen=True, kw_only=True)
class DRaFT(RewardBackprop):
    """L = mean of -R(x_0), differentiated through the last K steps (DRaFT-K); K = T is the full gradient.

    Clark et al. 2023, arXiv:2309.17400, algorithm 1. `loss` is `RewardBackprop.loss`.
    """

    gradient_steps: StepChoice = field(default=LastSteps(), metadata={"target": "unirl.sde.steps.LastSteps"})


@dataclass(frozen=True, kw_only=True)
class DRaFTLV(DRaFT):
    """DRaFT-1 with less variance: L = -(R(x_0) + sum over j of R(x_0^j)) / (n + 1), with n = 2 copies by default.

    x_0^j is the result of the last step, repeated from (1 - sigma) sg[x_0] + sigma eps_j at its noise level sigma.
    """

    extra_copies: int = 2
