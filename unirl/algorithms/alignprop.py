"""AlignProp: the full gradient, cut off at a random step."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.algorithms.shared.reward_backprop import RewardBackprop
from unirl.sde.steps import RandomTail
from unirl.types.protocols import StepChoice


@dataclass(frozen=True, kw_only=True)
class AlignProp(RewardBackprop):
    """L = mean of -w R(x_0), differentiated through all steps from a random one on, which every update draws anew.

    Prabhudesai et al. 2023, arXiv:2310.03739, section 4: a cut at a random step has neither the cost of the full
    gradient at every update nor the bias of one fixed cut.
    """

    gradient_steps: StepChoice = field(default=RandomTail(), metadata={"target": "unirl.sde.steps.RandomTail"})
    reward_weight: float = 0.01
