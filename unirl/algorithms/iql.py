"""Offline actor-critic losses on transitions: IQL, which never asks for the value of an action outside the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from unirl.algorithms.shared.critic_ensemble import ValueCritics, check_vectors
from unirl.algorithms.shared.critic_loss import CriticLoss
from unirl.algorithms.shared.transition_loss import BatchLoss
from unirl.config.errors import IncompatibleError
from unirl.models.policies.stage import ActionStage
from unirl.types.environments import ContinuousActions
from unirl.types.facts import ActionFacts, ModelFacts
from unirl.types.results import Metric, Metrics
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions, transitions_of

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class IQL(CriticLoss):
    """Implicit Q-learning. Kostrikov et al. 2021, arXiv:2110.06169, eqs. 5 to 7; means over a batch (o, a, R, o').

    A    = min over critics of Q_target(o, a) - V(o)
    L_V  = |expectile - 1(A < 0)| A^2
    L_Q  = sum over critics of (Q_i(o, a) - R - gamma^n (1 - terminated) V(o'))^2 / 2
    L_pi = min(exp(beta A), max_weight) times the loss of imitating a, which is -log pi(a|o)

    The three losses have one backward pass, since each reaches only its own parameters: A in L_pi and V in L_Q have no
    gradient. A flow policy imitates by its flow-matching loss. Transitions come from `stack.offline` and, unless
    `stack.offline_share` is 1, from the policy itself.
    """

    expectile: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    """V is this expectile of Q over the actions of the data: 0.5 their mean, towards 1 their largest."""
    beta: Annotated[float, Meta(ge=0)] = 3.0
    """Inverse temperature of the weights of actions. 0 imitates all of them alike."""
    max_weight: Annotated[float, Meta(gt=0)] = 100.0
    """Bound of the weight of an action."""
    norm: Literal["layer"] | None = None
    """Normalization in the critics."""

    def check_facts(self, facts: ModelFacts) -> None:
        if not isinstance(facts, ActionFacts):
            return
        if not (facts.can_imitate and isinstance(facts.actions, ContinuousActions)):
            raise IncompatibleError(
                f"algorithm: IQL imitates continuous actions of its data, which a {facts.family} cannot. Use "
                "GaussianBundle or FlowBundle of unirl.models.policies.bundle"
            )
        if facts.chunk != 1:
            raise IncompatibleError(
                f"algorithm: a transition of IQL's data has one action, and bundle.chunk={facts.chunk}. Set it to 1"
            )
        check_vectors(facts.inputs)

    def build_head(self, stage: ActionStage, width: int, seed: int) -> nn.Module:
        self.check_facts(stage.facts)
        return ValueCritics(self.build_critics(stage, width, seed, self.norm), stage.build_value_head(width, seed))

    def transitions(
        self, stage: ActionStage, segment: ActionSegment, weight: Float[Tensor, "B"], n_step: int
    ) -> Transitions:
        found = transitions_of(segment, weight, self.gamma, n_step)
        return replace(found, actions=stage.policy.executed(found.actions))

    def demonstrated(self, stage: ActionStage, segment: ActionSegment, n_step: int) -> Transitions:
        found = transitions_of(segment, torch.ones(len(segment)), self.gamma, n_step)
        return replace(found, actions=found.actions[:, None])

    def transition_loss(self, stage: ActionStage, batch: Transitions, generator: torch.Generator) -> BatchLoss:
        """The sum of the three losses. Importance weights multiply those of the critics and of the state values."""
        head, policy = value_critics_of(stage), stage.policy
        count, device = len(batch), batch.rewards.device
        eps = torch.randn(count, *policy.noise_shape, generator=generator).to(device)
        levels = torch.rand(count, generator=generator).to(device)
        importance = 1.0 if batch.weights is None else batch.weights

        pairs = head.critics.inputs(batch.observations, batch.actions)
        state_values, q = head.value(batch.observations), head.critics(pairs)
        with torch.no_grad():
            goal = batch.rewards + batch.discounts * head.value(batch.following)
            best = head.critics(pairs, weights="target").amin(0)
        advantages = best - state_values
        sides = torch.where(advantages < 0, 1 - self.expectile, self.expectile)
        value_loss = (importance * sides * advantages.square()).mean()
        gaps = q - goal
        critic_loss = 0.5 * (importance * gaps.square()).mean(1).sum()
        weights = (self.beta * advantages.detach()).exp().clamp(max=self.max_weight)
        actor_loss = (weights * policy.imitation(batch.observations, batch.actions, eps, levels)).mean()

        parts = {
            "critic": critic_loss,
            "value": value_loss,
            "actor": actor_loss,
            "q": q.mean(),
            "weight": weights.mean(),
        }
        detached = {name: value.detach() for name, value in parts.items()}
        return BatchLoss(critic_loss + value_loss + actor_loss, detached, gaps.detach().abs().mean(0))

    def after_update(self, stage: ActionStage) -> None:
        """Move the target networks, after an update was applied."""
        value_critics_of(stage).critics.move_targets(self.tau)

    def metrics(self, parts: Mapping[str, Float[Tensor, ""]]) -> Metrics:
        return {
            "train/q_loss": Metric.mean(parts["critic"]),
            "train/value_loss": Metric.mean(parts["value"]),
            "train/actor_loss": Metric.mean(parts["actor"]),
            "train/q_mean": Metric.mean(parts["q"]),
            "train/action_weight": Metric.mean(parts["weight"]),
        }


def value_critics_of(stage: ActionStage) -> ValueCritics:
    """The critics and state values that the stack gave to the stage."""
    assert isinstance(stage.value_head, ValueCritics), "the stack builds the critics before the first update"
    return stage.value_head
