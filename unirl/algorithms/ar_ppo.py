"""PPO with a critic on tokens: GAE gives every token its own advantage."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import Part, TokenRows
from unirl.algorithms.shared.critic import (
    OLD_VALUE,
    Critic,
    DenseLayout,
    GAEInputs,
    OutcomeCritic,
    StepCredit,
    gae,
    moments,
    outcome_rewards,
    whitened,
)
from unirl.algorithms.shared.tokens import Surrogate, Tokens, TokenValues
from unirl.models.language.stage import AnyTokenStage, TokenReplay, ValueGradient
from unirl.types.protocols import Needs, TrainingProgress
from unirl.types.segments import PackedSegment

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

ALL_TOKENS: Part = (0,)
ADVANTAGE, RETURN = "advantage", "return"
"""Anchors with the credit of every element, for updates on elements whose rows are not at hand."""


@dataclass(frozen=True, kw_only=True)
class TokenCritic(Critic[AnyTokenStage, PackedSegment], ARGRPO):
    """The clipped surrogate of `ARGRPO` with an advantage per element, and the loss of a value head.

    A subclass writes `gae_credit`, which says what the rewards of the elements are, and `gae_mask`.
    """

    whiten: bool = False
    """Normalise the advantages of the whole step to mean 0 and variance 1; costs a forward in the first update."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, totals=self.whiten)

    @abstractmethod
    def gae_credit(
        self, tokens: Tokens, old: Float[Tensor, "sum_L"], rows: TokenRows, part: Part, now: TrainingProgress
    ) -> StepCredit:
        """GAE from old values [sum L]: advantages and returns [sum L], 0 at elements that are not counted."""

    @abstractmethod
    def gae_mask(self, tokens: Tokens, rows: TokenRows) -> Bool[Tensor, "sum_L"]:
        """[sum L] bool, counted elements whose next value is known."""

    def credited(self, rows: TokenRows, now: TrainingProgress) -> TokenRows:
        """Rows whose credit is stored with them, from the values and log-probs of the anchor pass."""
        tokens = self.tokens(rows.segment.logp, rows, ALL_TOKENS)
        credit = self._credit(tokens, self.filled_anchor(rows, OLD_VALUE, ALL_TOKENS), rows, ALL_TOKENS, now)
        stored = {ADVANTAGE: credit.advantages, RETURN: credit.returns}
        return rows.replace(segment=rows.segment.replace(anchors={**rows.segment.anchors, **stored}))

    def assign_credit(
        self, tokens: Tokens, replay: TokenReplay, rows: TokenRows, part: Part, now: TrainingProgress
    ) -> Tokens:
        assert replay.values is not None, "the stage was asked for values and returned none"
        anchored = self.anchor(rows, OLD_VALUE, part)
        old = replay.values.detach() if anchored is None else anchored
        stored = self.anchor(rows, ADVANTAGE, part)
        if stored is None:
            credit = self._credit(tokens, old, rows, part, now)
        else:
            returns = self.filled_anchor(rows, RETURN, part)
            credit = StepCredit(tokens.rows.masked(stored), tokens.rows.masked(returns))
        critic = TokenValues(tokens.rows.masked(replay.values), tokens.rows.masked(old), credit.returns)
        return replace(tokens, advantages=credit.advantages, critic=critic)

    def _credit(self, tokens: Tokens, old: Tensor, rows: TokenRows, part: Part, now: TrainingProgress) -> StepCredit:
        """The credit of every element; advantages are normalised over the whole step if `whiten` says so."""
        credit = self.gae_credit(tokens, old, rows, part, now)
        if not self.whiten:
            return credit
        assert now.totals, "a loss with whiten needs the moments of the whole step in `now.totals`"
        of_step = torch.tensor(now.totals, dtype=torch.float64)
        return credit._replace(advantages=whitened(credit.advantages, self.gae_mask(tokens, rows), of_step))

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        policy, critic = super().surrogate(tokens, now), tokens.critic
        assert critic is not None, "assign_credit() comes first"
        losses, metrics = self.value_losses(critic.values, critic.old, critic.returns, tokens.weights)
        return replace(policy, metrics=policy.metrics | metrics, terms={"train/critic_loss": self.vf_coef * losses})

    def totals(self, rows: TokenRows, now: TrainingProgress) -> Float[Tensor, "3"]:
        """[3] count, sum and sum of squares of the advantages."""
        old = self.filled_anchor(rows, OLD_VALUE, ALL_TOKENS)
        tokens = self.tokens(rows.segment.logp, rows, ALL_TOKENS)  # only its old log-probs are read here
        credit = self.gae_credit(tokens, old, rows, ALL_TOKENS, now)
        return moments(credit.advantages, self.gae_mask(tokens, rows))


@dataclass(frozen=True, kw_only=True)
class ARPPO(OutcomeCritic[AnyTokenStage, PackedSegment], TokenCritic):
    """L = agg( P_t + vf_coef V_t ) over tokens.

    P_t  the clipped surrogate of `ARGRPO`, with the advantage A_t of the token instead of that of the row
    V_t  max((V - R_t)^2, (clip(V, V_old +- value_clip) - R_t)^2) / 2,  V = V(prompt, y_<t),  R_t = A_t + V_old
    A_t  GAE (arXiv:1506.02438, eq. 16) over the counted tokens; the reward of the last token is the outcome of the row,
         every token loses beta (log pi_old - log pi_ref) with kl_in: reward, and no value follows the last token

    PPO: Schulman et al. 2017, arXiv:1707.06347. With a KL in the reward: arXiv:2203.02155, eq. 2. `loss` is
    `TokenLoss.loss`; `TokenCritic` adds the value loss to the terms of `surrogate`.
    """

    value_gradient: ValueGradient = "head"
    """Parameters that the value loss trains: the head alone, on detached hidden states, or the policy's layers too."""
    bootstrap_truncated: bool = False
    """The return of a truncated response includes V of its last state; otherwise nothing follows its outcome.

    The last token of such a response only provides this value. It has no advantage and no return of its own.
    """

    def replay(self, stage: AnyTokenStage, rows: TokenRows, *, entropy: bool = False) -> TokenReplay:
        return stage.replay(rows.conditions, rows.segment, entropy=entropy, values=self.value_gradient)

    def gae_credit(
        self, tokens: Tokens, old: Float[Tensor, "sum_L"], rows: TokenRows, part: Part, now: TrainingProgress
    ) -> StepCredit:
        """The outcome of a row is the reward of its last token."""
        layout, old = DenseLayout.of(rows.segment.offsets, old.device), tokens.rows.masked(old)
        mask, values = layout.dense(self.gae_mask(tokens, rows)), layout.dense(old)
        rewards = outcome_rewards(self.row_return(rows).to(old.dtype), mask)
        kl_penalty = self.kl_penalty(tokens, rows, part, now)
        if kl_penalty is not None:
            rewards = rewards - layout.dense(kl_penalty.detach())
        last_values = None
        if self.bootstrap_truncated:  # V of the last state of a truncated response, and 0 for a finished one
            ends = self._truncated_ends(tokens, rows)
            last_values = tokens.rows.sum(torch.where(ends, old, 0.0)).to(old.dtype)
        credit = gae(GAEInputs.from_rows(rewards, values, mask, last_values), self.gamma, self.lam)
        returns = torch.where(mask, credit.returns, values)
        return StepCredit(layout.packed(credit.advantages), tokens.rows.masked(layout.packed(returns)))

    def gae_mask(self, tokens: Tokens, rows: TokenRows) -> Bool[Tensor, "sum_L"]:
        if not self.bootstrap_truncated:
            return tokens.rows.token_mask
        return tokens.rows.token_mask & ~self._truncated_ends(tokens, rows)

    def _truncated_ends(self, tokens: Tokens, rows: TokenRows) -> Tensor:
        """[sum L] bool, the last counted token of each truncated response."""
        ones = tokens.rows.token_mask.double()
        is_last = tokens.rows.token_mask & (tokens.rows.rest(ones) == 1)
        return is_last & tokens.rows.spread(~rows.segment.finished.to(is_last.device))
