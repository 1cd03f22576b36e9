"""DRTune: the gradient of the reward at early steps, without the gradient through the network's input."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.algorithms.shared.reward_backprop import RewardBackprop
from unirl.sde.steps import EquallySpacedSteps
from unirl.types.protocols import StepChoice


@dataclass(frozen=True, kw_only=True)
class DRTune(RewardBackprop):
    """L = mean of -R(x_0), whose gradient is  sum over i of  (sigma_i - sigma_{i+1}) (dv_i / dtheta)^T dR/dx_0.

    Wu et al. 2024, arXiv:2405.00760; i runs over K equally spaced steps. The network's input is detached, so gradients
    do not multiply over steps, and sampling stops at a random step of the last 40 percent. The coefficients above are
    those of Euler's method; other kernels have their own. `loss` is `RewardBackprop.loss`.
    """

    gradient_steps: StepChoice = field(
        default=EquallySpacedSteps(), metadata={"target": "unirl.sde.steps.EquallySpacedSteps"}
    )
    through_inputs: bool = False
    early_stop: float = 0.4
