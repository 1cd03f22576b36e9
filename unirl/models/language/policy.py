"""A causal language model of transformers as a policy: one forward over packed tokens.

    tokens --embed, images--> decoder layers, which call `attention_fn` --> hidden states --output_fn, head--> outputs

Everything runs inside the call of the root module, so that FSDP2, which hooks that call, sees one module with one
forward. Parameters keep the names of transformers, so adapters, checkpoints and exports recognise them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.models.chunks import round_up
from unirl.models.language.attention import ATTENTION, AttentionFn, register_attention
from unirl.types.conditions import PromptImageInputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformers import PretrainedConfig, PreTrainedModel

LOGITS_AT_ONCE = 2**25
"""Number of logits that exist at one time when log-probs are computed: 128 MiB in fp32, for any V and L."""

Outputs = dict[str, Tensor]
"""The outputs of a forward by name. A dictionary of tensors, because FSDP2 searches it for tensors."""
LMHead = Callable[[Tensor], Tensor]
"""The language model head: [M, V] logits from hidden states [M, D]."""


class OutputFn(Protocol):
    """Computes the outputs of a forward from its hidden states."""

    def __call__(self, lm_head: LMHead, hidden: Float[Tensor, "N D"]) -> Outputs:
        """The outputs from hidden states [N, D] of all tokens."""


@dataclass(frozen=True)
class TokenInputs:
    """The input of one forward: rows of tokens laid end to end, and the functions that attend and compute outputs."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, or [N, n] with n components
    attention_fn: AttentionFn
    output_fn: OutputFn
    images: PromptImageInputs | None = None
    """The images whose placeholders are among the tokens, in the same order."""


@dataclass(frozen=True)
class NextTokenLogits:
    """Output `logits` [M, V] fp32 of the token that follows each token of `index`."""

    index: Tensor  # [M] int64

    def __call__(self, lm_head: LMHead, hidden: Float[Tensor, "N D"]) -> Outputs:
        return {"logits": lm_head(hidden[self.index]).float()}


@dataclass(frozen=True, kw_only=True)
class NextTokenLogProbs:
    """Output `logp` [M] fp32, nats, of `targets` after the tokens `index`; on request also `entropy` and `hidden`.

    If not all logits fit at once, the head runs over a part of the hidden states at a time, and again in the backward
    pass, so that [N, V] logits never exist.
    """

    index: Tensor  # [M] int64
    targets: Tensor  # [M] int64
    temperature: float
    vocab_size: int
    entropy: bool = False
    """Also output `entropy` [M]."""
    hidden: bool = False
    """Also output `hidden` [M, D]."""
    multiple: int = 1
    """Hidden states go through the head in multiples of this number, or all at once."""

    def __call__(self, lm_head: LMHead, hidden: Float[Tensor, "N D"]) -> Outputs:
        states = hidden[self.index]
        logits_per_target = self.vocab_size * self.index.shape[1:].numel()
        size = round_up(max(LOGITS_AT_ONCE // logits_per_target, 1), self.multiple)
        compute = self._log_probs if len(states) <= size else self._recomputed_log_probs
        parts = [compute(lm_head, s, t) for s, t in zip(states.split(size), self.targets.split(size), strict=True)]
        outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return outputs | ({"hidden": states} if self.hidden else {})

    def _recomputed_log_probs(self, lm_head: LMHead, states: Tensor, targets: Tensor) -> Outputs:
        return checkpoint(self._log_probs, lm_head, states, targets, use_reentrant=False, preserve_rng_state=False)

    def _log_probs(self, lm_head: LMHead, states: Tensor, targets: Tensor) -> Outputs:
        logps = tempered(self._logits(lm_head, states), self.temperature)
        logp = logps.gather(1, targets[:, None])[:, 0]
        return {"logp": logp} | ({"entropy": -(logps.exp() * logps).sum(1)} if self.entropy else {})

    def _logits(self, lm_head: LMHead, states: Tensor) -> Tensor:
        return lm_head(states)


def tempered(logits: Float[Tensor, "M V"], temperature: float) -> Float[Tensor, "M V"]:
    """[M, V] log-probs of logits / temperature, fp32 or wider. Temperature 0 (greedy decoding) is scored at 1."""
    return (widened(logits) / (temperature or 1.0)).log_softmax(-1)


def widened(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Logits in fp32, or as they are if their dtype is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class TokenPolicy(nn.Module):
    """The mixin that `policy_class` puts before a class of transformers.

    Families may override `embeds`, `decoder` and `head`.
    """

    config: Any  # transformers evaluates this annotation, so it must not name a class that is imported lazily
    lm_head: nn.Module
    tie_weights: Callable[[], None]

    def __init__(self, config: PretrainedConfig) -> None:
        register_attention()
        super().__init__(config)
        config.get_text_config()._attn_implementation = ATTENTION

    def forward(self, inputs: TokenInputs) -> Outputs:
        """The outputs that `inputs.output_fn` computes from the hidden states of the tokens."""
        embeds, extra = self.embeds(inputs.tokens, inputs.images)
        positions = inputs.positions[None] if inputs.positions.dim() == 1 else inputs.positions.T[:, None]
        states = self.decoder()(
            inputs_embeds=embeds, position_ids=positions, use_cache=False, attention_fn=inputs.attention_fn, **extra
        )
        return inputs.output_fn(self.head(), states.last_hidden_state[0])

    def embeds(
        self, tokens: Int[Tensor, "N"], images: PromptImageInputs | None
    ) -> tuple[Float[Tensor, "1 N D"], dict[str, object]]:
        """Embeddings [1, N, D] of tokens [N], and further keyword arguments of the decoder."""
        return self.decoder().embed_tokens(tokens[None]), {}

    def decoder(self) -> PreTrainedModel:
        """The stack of layers: a module with `embed_tokens`, from embeddings to normed hidden states."""
        return self.get_submodule("model")

    def head(self) -> LMHead:
        """The module that computes logits from hidden states."""
        return self.lm_head


@cache
def policy_class(base: type[PreTrainedModel], mixin: type[TokenPolicy] = TokenPolicy) -> type[TokenPolicy]:
    """A subclass of a causal LM class of transformers whose `forward` is that of `mixin`, a family's own policy."""
    # transformers reads the source of the class's module to see that its attention can be replaced.
    return type(f"{base.__name__}Policy", (mixin, base), {"__module__": base.__module__})
