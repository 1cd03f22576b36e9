"""Classifier-free guidance on logits: how pairs of rows give the tokens and the log-probs of one sample.

    l = l_uncond + w (l_cond - l_uncond)

A sample takes two rows of every forward, the conditional and the unconditional branch, which hold the same sampled
tokens after different prompts. In decoding they have the slots 2i and 2i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from unirl.models.language.policy import LMHead, NextTokenLogProbs, Outputs, widened
from unirl.models.language.slots import SlotState, TokenSampler

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def guided_logits(pairs: Float[Tensor, "M 2 V"], scale: float) -> Float[Tensor, "M V"]:
    """[M, V] the guided logits, fp32 or wider, of (conditional, unconditional) pairs [M, 2, V]."""
    conditional, unconditional = widened(pairs).unbind(1)
    return unconditional + scale * (conditional - unconditional)


@dataclass(frozen=True, eq=False)
class GuidedSampler:
    """Samples the next token of every pair of slots, which both slots of the pair then read."""

    sampler: TokenSampler
    scale: float

    def __call__(
        self, state: SlotState, forbid_ends: bool = False, forced: Int[Tensor, "S"] | None = None
    ) -> tuple[Int[Tensor, "S"], Float[Tensor, "S"]]:
        """Tokens [S] and log-probs [S], equal within a pair. See `TokenSampler`."""
        pairs = SlotState(guided_logits(state.logits.unflatten(0, (-1, 2)), self.scale), state.counters[:, ::2])
        tokens, logps = self.sampler(pairs, forbid_ends, None if forced is None else forced[::2])
        return tokens.repeat_interleave(2), logps.repeat_interleave(2)


@dataclass(frozen=True, kw_only=True)
class GuidedLogProbs(NextTokenLogProbs):
    """The outputs of `NextTokenLogProbs` from guided logits. `hidden` is the state of the conditional branch."""

    index: Tensor  # [M, 2] int64, in the conditional and in the unconditional branch
    scale: float

    def __call__(self, lm_head: LMHead, hidden: Float[Tensor, "N D"]) -> Outputs:
        outputs = super().__call__(lm_head, hidden)
        return outputs | ({"hidden": outputs["hidden"][:, 0]} if self.hidden else {})

    def _logits(self, lm_head: LMHead, states: Float[Tensor, "M 2 D"]) -> Float[Tensor, "M V"]:
        return guided_logits(lm_head(states), self.scale)
