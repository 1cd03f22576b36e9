"""Imitation of demonstrated actions: behaviour cloning, which with labels of an expert is DAgger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.algorithms.shared.transition_loss import BatchLoss, TransitionLoss
from unirl.config.errors import IncompatibleError
from unirl.models.policies.stage import ActionStage
from unirl.types.facts import ActionFacts, ModelFacts
from unirl.types.protocols import Needs
from unirl.types.results import Metric, Metrics
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions, counted_decisions, last_decisions

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped


@dataclass(frozen=True, kw_only=True)
class BehaviourCloning(TransitionLoss):
    """L = mean over demonstrated decisions (o, a*) of -log pi(a* | o), the negative log-likelihood in nats.

    A flow policy has no density of an action; its loss is the flow-matching loss of `FlowPolicy.imitation` instead.
    Behaviour cloning: Pomerleau 1988. Demonstrations come from `stack.offline`, and from an expert that labels what the
    policy does (`pipeline.expert`). With such labels on the states that the policy visits, and all of them kept, this
    is DAgger: Ross et al. 2011, arXiv:1011.0686, algorithm 3.1; `sampling.expert_share` is its schedule of beta.
    """

    @property
    def needs(self) -> Needs:
        return Needs(advantages=False)

    def check_facts(self, facts: ModelFacts) -> None:
        if isinstance(facts, ActionFacts) and not facts.can_imitate:
            raise IncompatibleError(
                f"algorithm: BehaviourCloning imitates actions that somebody else took, for which a {facts.family} has "
                "no loss. Train it with unirl.algorithms.action_ppo.ActionPPO or ActionGRPO, or imitate with a bundle "
                "of unirl.models.policies.bundle"
            )

    def check_own_rows(self, sampling: ActionSamplingParams) -> None:
        if sampling.expert_share is None:
            raise IncompatibleError(
                "algorithm: BehaviourCloning imitates, and nothing is shown to it. Set pipeline.expert and "
                "sampling.expert_share (DAgger), or stack.offline and stack.offline_share=1 (demonstrations alone)"
            )

    def transitions(
        self, stage: ActionStage, segment: ActionSegment, weight: Float[Tensor, "B"], n_step: int
    ) -> Transitions:
        assert segment.labels is not None, "check_own_rows refuses rows without labels"
        where = torch.nonzero(counted_decisions(segment, weight))[:, 0]
        return labelled(segment, where, segment.labels[where][:, None])

    def demonstrated(self, stage: ActionStage, segment: ActionSegment, n_step: int) -> Transitions:
        """Every decision of an episode after which the actions of a whole chunk follow, with these actions."""
        chunk = stage.facts.chunk
        start = torch.nonzero(segment.loss_mask)[:, 0]
        where = start[start + chunk - 1 <= last_decisions(segment, start)]
        return labelled(segment, where, torch.stack([segment.actions[where + k] for k in range(chunk)], dim=1))

    def transition_loss(self, stage: ActionStage, batch: Transitions, generator: torch.Generator) -> BatchLoss:
        count, device, policy = len(batch), batch.rewards.device, stage.policy
        eps = torch.randn(count, *policy.noise_shape, generator=generator).to(device)
        levels = torch.rand(count, generator=generator).to(device)
        loss = policy.imitation(batch.observations, batch.actions, eps, levels).mean()
        return BatchLoss(loss, {"imitation": loss.detach()})

    def metrics(self, parts: Mapping[str, Float[Tensor, ""]]) -> Metrics:
        return {"train/imitation_loss": Metric.mean(parts["imitation"])}


def labelled(segment: ActionSegment, where: Int[Tensor, "N"], actions: Shaped[Tensor, "N C *action"]) -> Transitions:
    """The observations at `where` with the actions [N, C, ...] to imitate. Nothing follows them."""
    nothing = torch.zeros(len(where))
    return Transitions(
        observations={key: value[where] for key, value in segment.observations.items()},
        actions=actions,
        rewards=nothing,
        discounts=nothing,
        following={},
    )
