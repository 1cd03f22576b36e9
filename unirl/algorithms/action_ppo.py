"""PPO and GRPO on decisions in environments: the losses of tokens, with the rewards of the environment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor
from torch.nn.functional import pad

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import TokenCritic
from unirl.algorithms.base import Part, TokenRows
from unirl.algorithms.shared.critic import DenseLayout, GAEInputs, StepCredit, gae
from unirl.algorithms.shared.tokens import Tokens
from unirl.config.errors import IncompatibleError
from unirl.models.language.stage import AnyTokenStage, TokenReplay
from unirl.types.facts import ActionFacts, ModelFacts
from unirl.types.protocols import Needs, TrainingProgress
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def check_entropy(entropy_coef: float, facts: ModelFacts) -> None:
    """Raises IncompatibleError for an entropy bonus of a policy whose entropy has no closed form."""
    if entropy_coef > 0 and isinstance(facts, ActionFacts) and not facts.has_entropy:
        raise IncompatibleError(
            f"algorithm.entropy_coef={entropy_coef}: the entropy of a {facts.family} has no closed form. Set "
            "algorithm.entropy_coef=0, or bundle.squashed=false"
        )


@dataclass(frozen=True, kw_only=True)
class ActionGRPO(ARGRPO):
    """`ARGRPO` on the decisions of episodes that began alike: every decision has the advantage of its episode.

    GRPO (arXiv:2402.03300, eq. 3), where a group is the episodes of one start, and the reward of an episode its return.
    """

    trains_tokens: ClassVar[bool] = True
    sampled_by: ClassVar[type] = ActionSamplingParams

    def check_facts(self, facts: ModelFacts) -> None:
        check_entropy(self.entropy_coef, facts)


@dataclass(frozen=True, kw_only=True)
class ActionPPO(TokenCritic):
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

    trains_tokens: ClassVar[bool] = True
    sampled_by: ClassVar[type] = ActionSamplingParams

    @property
    def needs(self) -> Needs:
        return replace(super().needs, advantages=False)

    def check_facts(self, facts: ModelFacts) -> None:
        check_entropy(self.entropy_coef, facts)

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
