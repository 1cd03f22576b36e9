"""PPO and GRPO on decisions in environments: the losses of tokens, with the rewards of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import TokenCritic
from unirl.algorithms.base import Part, TokenRows
from unirl.algorithms.shared.checks import check_no_expert
from unirl.algorithms.shared.critic import DenseLayout, GAEInputs, StepCredit, gae
from unirl.algorithms.shared.kl import MAX_LOG_RATIO
from unirl.algorithms.shared.tokens import Tokens
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.models.language.stage import AnyTokenStage, TokenReplay
from unirl.types.facts import ActionFacts, ModelFacts
from unirl.types.protocols import Anchor, Needs, TrainingProgress
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


OLD_PARTS = "old_parts"
"""The anchor with the old log-probs of the parts of decisions."""


@dataclass(frozen=True, kw_only=True)
class PartRatios(ARGRPO):
    """Ratios of whole decisions, or of each of their parts: the tokens or actions of a chunk of a large policy.

    With parts, P_t is the mean over the U parts of the clipped surrogate, each with a ratio r_u of its own:
    P_t = (1 / U) sum_u -min(r_u A_t, clip(r_u, 1 - low, 1 + high) A_t)
    """

    ratio_of: Literal["decision", "part"] = "decision"
    """Clip one ratio for each decision, or one for each of its parts, which the policy defines (`bundle.parts`)."""

    trains_tokens: ClassVar[bool] = True
    sampled_by: ClassVar[type] = ActionSamplingParams

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_of == "part" and self.old_logp_source == "rollout":
            raise InvalidValueError(
                "algorithm.ratio_of=part needs the old log-probs of parts, which rollouts do not record. Leave out "
                "algorithm.old_logp_source"
            )

    def check_sampling(self, sampling: ActionSamplingParams) -> None:
        check_no_expert(sampling)

    def check_facts(self, facts: ModelFacts) -> None:
        if not isinstance(facts, ActionFacts):
            return
        if self.ratio_of == "part" and not facts.has_parts:
            raise IncompatibleError(
                f"algorithm.ratio_of=part: the decisions of a {facts.family} have no parts. Set "
                "algorithm.ratio_of=decision"
            )
        if self.entropy_coef > 0 and not facts.has_entropy:
            raise IncompatibleError(
                f"algorithm.entropy_coef={self.entropy_coef}: the entropy of a {facts.family} has no closed form. Set "
                "algorithm.entropy_coef=0, or bundle.squashed=false"
            )

    def anchors(self) -> Mapping[str, Anchor]:
        return {**super().anchors(), **({OLD_PARTS: Anchor("live", "parts")} if self.ratio_of == "part" else {})}

    def assign_credit(
        self, tokens: Tokens, replay: TokenReplay, rows: TokenRows, part: Part, now: TrainingProgress
    ) -> Tokens:
        return super().assign_credit(self.with_parts(tokens, replay, rows, part), replay, rows, part, now)

    def with_parts(self, tokens: Tokens, replay: TokenReplay, rows: TokenRows, part: Part) -> Tokens:
        """The tokens with the ratios of the parts of each decision, if these are clipped."""
        if self.ratio_of == "decision":
            return tokens
        assert replay.parts is not None, "facts that say a decision has parts belong to a policy that gives them"
        old = self.anchor(rows, OLD_PARTS, part)
        gaps = replay.parts - (replay.parts.detach() if old is None else old)
        counted = tokens.rows.token_mask[:, None]
        return replace(tokens, part_ratios=torch.where(counted, gaps, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


@dataclass(frozen=True, kw_only=True)
class ActionGRPO(PartRatios):
    """`ARGRPO` on the decisions of episodes that began alike: every decision has the advantage of its episode.

    GRPO (arXiv:2402.03300, eq. 3), where a group is the episodes of one start, and the reward of an episode its return.
    """


@dataclass(frozen=True, kw_only=True)
class ActionPPO(PartRatios, TokenCritic):
    """L = mean over decisions of  P_t + vf_coef V_t - entropy_coef H_t.

    P_t  the clipped surrogate of `ARGRPO`, with the advantage A_t of the decision
    V_t  (V(o_t) - R_t)^2 / 2, at most clipped around V_old,  R_t = A_t + V_old(o_t)
    A_t  GAE (arXiv:1506.02438, eq. 16) over the rewards of the environment. After a decision that terminated nothing
         follows; after one that was cut off follows V_old of the observation that the environment would have gone on
         from (Pardo et al. 2018, arXiv:1712.00378)

    PPO: Schulman et al. 2017, arXiv:1707.06347. `loss` is `TokenLoss.loss`.
    """

    gamma: float = 0.99
    whiten: bool = True
    value_clip: float | None = None

    @property
    def needs(self) -> Needs:
        return replace(super().needs, advantages=False)

    def replay(self, stage: AnyTokenStage, rows: TokenRows, *, entropy: bool = False) -> TokenReplay:
        return stage.replay(rows.conditions, rows.segment, entropy=entropy, values="head")

    def token_advantages(self, rows: TokenRows, part: Part, old_logp: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
        """[sum L] zeros: `assign_credit` computes the advantages."""
        return old_logp.new_zeros(old_logp.shape)

    def gae_credit(
        self, tokens: Tokens, old: Float[Tensor, "sum_L"], rows: TokenRows, part: Part, now: TrainingProgress
    ) -> StepCredit:
        """The values after a decision are those of the next element, which context elements provide after cuts."""
        segment = cast(ActionSegment, rows.segment)
        layout = DenseLayout.of(segment.offsets, old.device)
        values, mask = layout.dense(old), layout.dense(tokens.rows.token_mask)
        rewards = layout.dense(segment.rewards).to(old.dtype)
        kl_penalty = self.kl_penalty(tokens, rows, part, now)
        if kl_penalty is not None:
            rewards = rewards - layout.dense(kl_penalty.detach())
        following = pad(values[:, 1:], (0, 1)).masked_fill(layout.dense(segment.terminated), 0.0)
        inputs = GAEInputs(rewards, values, following, layout.dense(segment.ends), mask)
        credit = gae(inputs, self.gamma, self.lam)
        return StepCredit(layout.packed(credit.advantages), layout.packed(credit.returns))

    def gae_mask(self, tokens: Tokens, rows: TokenRows) -> Bool[Tensor, "sum_L"]:
        return tokens.rows.token_mask
