"""The base of losses with critics Q(o, a), for actions of the policy (SAC) or of recorded data (IQL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from unirl.algorithms.shared.checks import check_no_expert
from unirl.algorithms.shared.critic_ensemble import Critics
from unirl.algorithms.shared.transition_loss import TransitionLoss
from unirl.config.errors import IncompatibleError
from unirl.models.policies.stage import ActionStage
from unirl.sde.noise import key_seed
from unirl.types.protocols import Needs
from unirl.types.sampling import ActionSamplingParams


@dataclass(frozen=True, kw_only=True)
class CriticLoss(TransitionLoss):
    """A loss of transitions with rewards, which trains an ensemble of critics beside the policy."""

    gamma: Annotated[float, Meta(ge=0, le=1)] = 0.99
    """Discount of one decision."""
    tau: Annotated[float, Meta(gt=0, le=1)] = 0.005
    """Weight of the live critics in an update of their targets."""
    members: Annotated[int, Meta(ge=1)] = 2
    """Number of critics, E."""

    has_errors: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(value=True, advantages=False)

    def check_sampling(self, sampling: ActionSamplingParams) -> None:
        check_no_expert(sampling)

    def check_demonstrations(self, has_rewards: bool) -> None:
        if not has_rewards:
            raise IncompatibleError(
                f"stack.offline: the data set has no rewards, from which {type(self).__name__} learns. Take one with "
                "rewards (next.reward of LeRobot), or imitate it with unirl.algorithms.imitation.BehaviourCloning"
            )

    def build_critics(self, stage: ActionStage, width: int, seed: int, norm: str | None, alpha: float = 1.0) -> Critics:
        """Critics of the decisions of a policy, on the observations that it reads.

        Args:
            norm: normalization in the critics: `layer`, `batch`, or None.
            alpha: initial temperature.
        """
        return Critics(
            stage.facts.inputs,
            stage.policy.decision_size,
            members=self.members,
            width=width,
            depth=stage.depth,
            norm=norm,
            alpha=alpha,
            seed=key_seed(seed, "critics"),
        )
