"""PPO with a critic on tokens: each token is credited with what it changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import Part
from unirl.algorithms.shared.critic import (
    OLD_VALUE,
    Critic,
    DenseLayout,
    GAEInputs,
    Moments,
    StepCredit,
    gae,
    outcome_rewards,
    whitened,
)
from unirl.algorithms.shared.tokens import Surrogate, Tokens, TokenValues
from unirl.models.language.stage import TokenReplay, TokenStage, ValueGradient
from unirl.types.protocols import Needs, TrainingProgress
from unirl.types.rollout_resp import RolloutTrack

ALL_TOKENS: Part = (0,)


@dataclass(frozen=True, kw_only=True)
class ARPPO(Critic[TokenStage], ARGRPO):
    """L = agg( P_t + vf_coef V_t ) over tokens.

    P_t  ARGRPO's clipped surrogate, of the advantage A_t instead of the row's
    V_t  max((V - R_t)^2, (clip(V, V_old +- value_clip) - R_t)^2) / 2,  V = V(prompt, y_<t),  R_t = A_t + V_old
    A_t  GAE (arXiv:1506.02438, eq. 16) over the tokens that count: the row's outcome arrives after the last of them,
         each costs beta (log pi_old - log pi_ref) if kl_in: reward, and nothing follows

    PPO is arXiv:1707.06347; with a KL in the reward, arXiv:2203.02155 (eq. 2).
    """

    value_gradient: ValueGradient = "head"
    """What the value loss trains: the head alone, on hidden states as they are, or the policy's layers as well."""
    whiten: bool = False
    """Advantages of the whole step to mean 0 and variance 1 over its tokens; costs a forward in the first update."""
    bootstrap_truncated: bool = False
    """A response that was cut goes on in the critic's eyes: V of its last state follows its outcome; else nothing does.

    The last token of such a response is where V is read, and earns nothing.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_critic()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, totals=self.whiten)

    def replay(self, stage: TokenStage, rows: RolloutTrack, *, entropy: bool = False) -> TokenReplay:
        return stage.replay(rows.conditions, rows.segment, entropy=entropy, values=self.value_gradient)

    def assign_credit(
        self, tokens: Tokens, replay: TokenReplay, rows: RolloutTrack, part: Part, now: TrainingProgress
    ) -> Tokens:
        assert replay.values is not None, "the stage was asked for values and gave none"
        said = tokens.rows.masked(replay.values)
        recorded = self.anchor(rows, OLD_VALUE, part)
        old = said.detach() if recorded is None else tokens.rows.masked(recorded)
        credit = self.gae_credit(tokens, old, rows, part, now)
        advantages = credit.advantages
        if self.whiten:
            assert now.totals, "a loss that whitens is told the moments of the whole step"
            moments = Moments(*torch.tensor(now.totals, dtype=torch.float64))
            advantages = whitened(advantages, self.gae_mask(tokens, rows), moments)
        return replace(tokens, advantages=advantages, values=TokenValues(said, old, credit.returns))

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        policy, values = super().surrogate(tokens, now), tokens.values
        assert values is not None, "assign_credit() comes first"
        losses, metrics = self.value_losses(values.said, values.old, values.returns, tokens.weights)
        return replace(policy, metrics=policy.metrics | metrics, terms={"train/critic_loss": self.vf_coef * losses})

    def totals(self, rows: RolloutTrack, now: TrainingProgress) -> Tensor:
        """[3] number, sum and sum of squares of the advantages."""
        recorded = self.anchor(rows, OLD_VALUE, ALL_TOKENS)
        assert recorded is not None, "the anchor pass comes first"
        tokens = self.tokens(rows.segment.logp, rows, ALL_TOKENS)  # of their log-probs only the old ones are read
        credit = self.gae_credit(tokens, tokens.rows.masked(recorded), rows, ALL_TOKENS, now)
        moments = Moments.of(credit.advantages, self.gae_mask(tokens, rows))
        return torch.stack([moments.count, moments.total, moments.squares])

    def gae_credit(
        self, tokens: Tokens, old: Tensor, rows: RolloutTrack, part: Part, now: TrainingProgress
    ) -> StepCredit:
        """[sum L] twice: GAE from old values [sum L]; 0 where a token does not count."""
        packing = DenseLayout.of(rows.segment.offsets, old.device)
        mask, values = packing.dense(self.gae_mask(tokens, rows)), packing.dense(old)
        rewards = outcome_rewards(self.row_return(rows).to(old.dtype), mask)
        kl_penalty = self.kl_penalty(tokens, rows, part, now)
        if kl_penalty is not None:
            rewards = rewards - packing.dense(kl_penalty.detach())
        found = gae(
            GAEInputs.from_rows(rewards, values, mask, self._last_values(tokens, old, rows)),
            self.gamma,
            self.lam,
        )
        returns = torch.where(mask, found.returns, values)
        return StepCredit(packing.packed(found.advantages), tokens.rows.masked(packing.packed(returns)))

    def gae_mask(self, tokens: Tokens, rows: RolloutTrack) -> Tensor:
        """[sum L] bool, tokens that count and whose successor's value is known."""
        if not self.bootstrap_truncated:
            return tokens.rows.token_mask
        return tokens.rows.token_mask & ~self._cut_ends(tokens, rows)

    def _cut_ends(self, tokens: Tokens, rows: RolloutTrack) -> Tensor:
        """[sum L] bool, the last token that counts of a response that was cut."""
        ones = tokens.rows.token_mask.double()
        is_last = tokens.rows.token_mask & (tokens.rows.rest(ones) == 1)
        return is_last & tokens.rows.spread(~rows.segment.finished.to(is_last.device))

    def _last_values(self, tokens: Tokens, old: Tensor, rows: RolloutTrack) -> Tensor | None:
        """[B] V of the state after the last credited token: that before a cut, and 0 at an end."""
        if not self.bootstrap_truncated:
            return None
        return tokens.rows.sum(torch.where(self._cut_ends(tokens, rows), old, 0.0)).to(old.dtype)
