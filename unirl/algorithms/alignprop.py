"""AlignProp: the gradient of the reward through all steps after a random one."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.algorithms.shared.reward_backprop import RewardBackprop
from unirl.sde.steps import RandomTail
from unirl.types.protocols import StepChoice


@dataclass(frozen=True, kw_only=True)
class AlignProp(RewardBackprop):
    """L = mean of -w R(x_0), differentiated through all steps from a random one on, drawn anew at each step.

    Prabhudesai et al. 2023, arXiv:2310.03739, section 4. Truncation at a random step is cheaper than the full gradient
    and less biased than truncation at a fixed step. `loss` is `RewardBackprop.loss`.
    """

    gradient_steps: StepChoice = field(default=RandomTail(), metadata={"target": "unirl.sde.steps.RandomTail"})
    reward_weight: float = 0.01
