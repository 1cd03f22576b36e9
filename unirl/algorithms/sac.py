"""Off-policy actor-critic losses on transitions: SAC, and CrossQ and RLPD as settings of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from unirl.algorithms.shared.critic_ensemble import Critics, check_vectors
from unirl.algorithms.shared.critic_loss import CriticLoss
from unirl.algorithms.shared.transition_loss import BatchLoss
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.models.policies.stage import ActionStage
from unirl.types.facts import ActionFacts, ModelFacts
from unirl.types.results import Metric, Metrics
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions, transitions_of

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class SAC(CriticLoss):
    """Soft actor-critic. Haarnoja et al. 2018, arXiv:1812.05905, eqs. 5, 7 and 18; means over a batch (o, a, R, o').

    y    R + gamma^n (1 - terminated) (Q_target(o', a') - alpha log pi(a'|o')),   a' ~ pi(o')
    L_Q  = sum over critics of (Q_i(o, a) - y)^2 / 2
    L_pi = alpha log pi(a~|o) - Q(o, a~),   a~ ~ pi(o), reparameterised
    L_alpha = -log alpha (log pi(a~|o) + H),   H = `target_entropy`

    L_alpha is that of the authors' code, whose gradient with respect to log alpha does not shrink with alpha.

    The three losses have one backward pass, since each reaches only its own parameters: L_pi reads the critics with
    fixed weights. The sequential form updates the critics first, so the policy sees them one update later here.

    CrossQ (Bhatt et al. 2019, arXiv:1902.05605): `norm: batch`, `target: live`. One forward has (o, a) and (o', a').
    RLPD (Ball et al. 2023, arXiv:2302.02948): `norm: layer`, `members: 10`, and `stack.offline`.
    REDQ (Chen et al. 2021, arXiv:2101.05982): `members: 10`, `subset: 2`, `stack.updates_per_decision: 20`.
    """

    subset: Annotated[int, Meta(ge=1)] = 2
    """Critics, drawn for each update, whose minimum is the target."""
    actor_value: Literal["min", "mean"] = "min"
    """Q in L_pi, over all critics."""
    target: Literal["polyak", "live"] = "polyak"
    """Weights of Q_target: averaged ones, or the critics themselves without a gradient."""
    norm: Literal["layer", "batch"] | None = None
    """Normalization in the critics."""
    alpha: Annotated[float, Meta(gt=0)] = 1.0
    """Temperature, or its initial value if it is learned."""
    learn_alpha: bool = True
    """Adapt the temperature so that the entropy of the policy is `target_entropy`."""
    target_entropy: float | None = None
    """H in nats. If absent, minus the dimensions of a decision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset > self.members:
            raise InvalidValueError(
                f"algorithm.subset={self.subset} must be <= algorithm.members={self.members}, the number of critics"
            )
        if self.norm == "batch" and self.target != "live":
            raise IncompatibleError(
                "algorithm.norm=batch has no statistics for averaged weights. Set algorithm.target=live (CrossQ)"
            )

    def check_facts(self, facts: ModelFacts) -> None:
        if not isinstance(facts, ActionFacts):
            return
        if not facts.is_squashed:
            raise IncompatibleError(
                f"algorithm: SAC trains squashed Gaussian policies, and the bundle has a {facts.family}. "
                "Use unirl.models.policies.bundle.GaussianBundle with squashed: true, or SteeredBundle (DSRL) for a "
                "flow policy"
            )
        check_vectors(facts.inputs)

    def build_head(self, stage: ActionStage, width: int, seed: int) -> nn.Module:
        self.check_facts(stage.facts)
        return self.build_critics(stage, width, seed, self.norm, self.alpha)

    def transitions(
        self, stage: ActionStage, segment: ActionSegment, weight: Float[Tensor, "B"], n_step: int
    ) -> Transitions:
        return transitions_of(segment, weight, self.gamma, n_step)

    def demonstrated(self, stage: ActionStage, segment: ActionSegment, n_step: int) -> Transitions:
        found = transitions_of(segment, torch.ones(len(segment)), self.gamma, n_step)
        return replace(found, actions=stage.policy.recorded(found.actions[:, None]))

    def transition_loss(self, stage: ActionStage, batch: Transitions, generator: torch.Generator) -> BatchLoss:
        """The sum of the three losses. Importance weights multiply the loss of the critics alone.

        Args:
            generator: on the CPU; noise of the actions and the choice of critics come from it.
        """
        critics = critics_of(stage)
        count, device = len(batch), batch.rewards.device
        noise = torch.randn(2, count, *stage.policy.noise_shape, generator=generator).to(device)
        chosen = torch.randperm(self.members, generator=generator)[: self.subset]
        alpha = critics.log_alpha.exp()
        fixed_alpha = alpha.detach()

        taken = critics.inputs(batch.observations, stage.policy.executed(batch.actions))
        with torch.no_grad():
            after = stage.network(batch.following, noise=noise[1])
            following = critics.inputs(batch.following, stage.policy.executed(after["actions"]))
        values, next_values = self._values(critics, taken, following)
        if self.subset < self.members:
            next_values = next_values[chosen.to(device)]
        goal = batch.rewards + batch.discounts * (next_values.amin(0) - fixed_alpha * after["logp"])
        gaps = values - goal
        squares = gaps.square() if batch.weights is None else batch.weights * gaps.square()
        critic_loss = 0.5 * squares.mean(1).sum()

        now = stage.network(batch.observations, noise=noise[0])
        proposed = critics.inputs(batch.observations, stage.policy.executed(now["actions"]))
        q = critics(proposed, weights="fixed")
        soft_value = q.amin(0) if self.actor_value == "min" else q.mean(0)
        actor_loss = (fixed_alpha * now["logp"] - soft_value).mean()

        entropy = -now["logp"].detach().mean()
        loss = critic_loss + actor_loss
        if self.learn_alpha:
            goal_entropy = -float(stage.policy.decision_size) if self.target_entropy is None else self.target_entropy
            loss = loss + critics.log_alpha * (entropy - goal_entropy)
        parts = {"critic": critic_loss, "actor": actor_loss, "alpha": alpha, "entropy": entropy, "q": values.mean()}
        detached = {name: value.detach() for name, value in parts.items()}
        return BatchLoss(loss, detached, gaps.detach().abs().mean(0))

    def _values(self, critics: Critics, taken: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Q [E, N] of what was done, and of what follows, without a gradient."""
        if self.norm == "batch":
            both = critics(torch.cat([taken, following]), batch_statistics=True)
            return both[:, : len(taken)], both[:, len(taken) :].detach()
        with torch.no_grad():
            after = critics(following, weights="target" if self.target == "polyak" else "live")
        return critics(taken), after

    def after_update(self, stage: ActionStage) -> None:
        """Move the target networks, after an update was applied."""
        if self.target == "polyak":
            critics_of(stage).move_targets(self.tau)

    def metrics(self, parts: Mapping[str, Float[Tensor, ""]]) -> Metrics:
        """The metrics of an update, from the parts of its loss."""
        return {
            "train/q_loss": Metric.mean(parts["critic"]),
            "train/actor_loss": Metric.mean(parts["actor"]),
            "train/alpha": Metric.mean(parts["alpha"]),
            "train/policy_entropy": Metric.mean(parts["entropy"]),
            "train/q_mean": Metric.mean(parts["q"]),
        }


def critics_of(stage: ActionStage) -> Critics:
    """The critics that the stack gave to the stage."""
    assert isinstance(stage.value_head, Critics), "the stack builds the critics before the first update"
    return stage.value_head
