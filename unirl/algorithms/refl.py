"""ReFL: the gradient of the reward of one late step's clean prediction."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.algorithms.shared.reward_backprop import RewardBackprop
from unirl.sde.steps import LastSteps
from unirl.types.protocols import StepChoice


@dataclass(frozen=True, kw_only=True)
class ReFL(RewardBackprop):
    """L = mean w relu(2 - (R(x_m - sigma_m v_m) - b) / s), m uniform over the last quarter of the steps, x_m detached.

    Xu et al. 2023, arXiv:2304.05977, algorithm 1, with the weight and the ceiling of the published code. The ceiling is
    in units of ImageReward, whose scores have mean 0 and standard deviation 1. For another reward, set reward_mean b
    and reward_std s, or no ceiling. `loss` is `RewardBackprop.loss`.
    """

    gradient_steps: StepChoice = field(default=LastSteps(), metadata={"target": "unirl.sde.steps.LastSteps"})
    early_stop: float = 0.25
    reward_weight: float = 1e-3
    reward_ceiling: float | None = 2.0
