"""A causal language model of transformers as a policy: one forward over packed tokens, whatever is asked of it.

    tokens --embed, images--> decoder, told by `attention_fn` who sees whom --> hidden states --head--> what is asked

All of it runs inside the root module's own call, so that FSDP2, which hooks that call, sees one module with one
forward; parameters keep transformers' own names, so adapters, checkpoints and exports know them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.models.chunks import round_up
from unirl.models.language.attention import ATTENTION, AttentionFn, register_attention
from unirl.types.conditions import ImagePatches

LOGITS_AT_ONCE = 2**25
"""Logits that exist at one time when log-probs are computed: 128 MiB in fp32, whatever V and L are."""

Outputs = dict[str, Tensor]
"""What a forward gives back, by name. A dictionary of tensors, since FSDP2 looks for tensors in it."""
LMHead = Callable[[Tensor], Tensor]
"""The head: [M, V] logits from hidden states [M, D]."""


class OutputFn(Protocol):
    """What is wanted of the hidden states of one forward."""

    def __call__(self, project: LMHead, hidden: Tensor) -> Outputs:
        """The answers from hidden states [N, D] of all tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The input of one forward: rows of tokens laid end to end."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, or [N, 3] (time, row, column)
    attention_fn: AttentionFn
    output_fn: OutputFn
    images: ImagePatches | None = None
    """The images whose placeholders stand among the tokens, in their order."""


@dataclass(frozen=True)
class NextTokenLogits:
    """logits [M, V] fp32 of the token after each of `at`."""

    at: Tensor  # [M] int64

    def __call__(self, project: LMHead, hidden: Tensor) -> Outputs:
        return {"logits": project(hidden[self.at]).float()}


@dataclass(frozen=True, kw_only=True)
class NextTokenLogProbs:
    """logp [M] of `targets` after the tokens `at`, nats, fp32; entropy [M] and hidden [M, D] where these are wanted.

    Where not all logits fit at once, the head runs over some hidden states at a time, and again in the backward pass:
    [N, V] never exists.
    """

    at: Tensor  # [M] int64
    targets: Tensor  # [M] int64
    temperature: float
    vocab_size: int
    entropy: bool = False
    hidden: bool = False
    multiple: int = 1
    """Hidden states go through the head in numbers that are multiples of this, or all at once."""

    def __call__(self, project: LMHead, hidden: Tensor) -> Outputs:
        states = hidden[self.at]
        size = round_up(max(LOGITS_AT_ONCE // self.vocab_size, 1), self.multiple)
        compute = self._densities if len(states) <= size else self._again_in_backward
        pieces = [compute(project, s, t) for s, t in zip(states.split(size), self.targets.split(size), strict=True)]
        found = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return found | ({"hidden": states} if self.hidden else {})

    def _again_in_backward(self, project: LMHead, states: Tensor, targets: Tensor) -> Outputs:
        found: Outputs = checkpoint(
            self._densities, project, states, targets, use_reentrant=False, preserve_rng_state=False
        )
        return found

    def _densities(self, project: LMHead, states: Tensor, targets: Tensor) -> Outputs:
        logps = tempered(project(states), self.temperature)
        logp = logps.gather(1, targets[:, None])[:, 0]
        return {"logp": logp} | ({"entropy": -(logps.exp() * logps).sum(1)} if self.entropy else {})


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """[M, V] fp32 log-probs of logits / temperature; greedy decoding (temperature 0) is judged at temperature 1."""
    return (logits.float() / (temperature or 1.0)).log_softmax(-1)


class TokenPolicy(nn.Module):
    """What `policy_class` puts before a class of transformers. A family may override `embeds` and `decoder`."""

    config: Any
    lm_head: nn.Module

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        register_attention()
        super().__init__(config, *args, **kwargs)
        config.get_text_config()._attn_implementation = ATTENTION

    def forward(self, inputs: TokenInputs) -> Outputs:
        """What `inputs` asks of its tokens' hidden states."""
        embeds, extra = self.embeds(inputs.tokens, inputs.images)
        positions = inputs.positions[None] if inputs.positions.dim() == 1 else inputs.positions.T[:, None]
        states = self.decoder()(
            inputs_embeds=embeds, position_ids=positions, use_cache=False, attention_fn=inputs.attention_fn, **extra
        )
        return inputs.output_fn(self.lm_head, states.last_hidden_state[0])

    def embeds(self, tokens: Tensor, images: ImagePatches | None) -> tuple[Tensor, dict[str, Any]]:
        """[1, N, D] what the decoder reads for tokens [N], and what else its forward is to be told."""
        return self.decoder().embed_tokens(tokens[None]), {}

    def decoder(self) -> Any:
        """The stack of layers: a module with `embed_tokens`, from embeddings to normed hidden states."""
        return self.get_submodule("model")


@cache
def policy_class(base: type, mixin: type[TokenPolicy] = TokenPolicy) -> type:
    """A subclass of a causal LM class of transformers whose `forward(inputs)` is that of `TokenPolicy`.

    Args:
        mixin: what comes before `base`: a family's own subclass of `TokenPolicy`.
    """
    # transformers reads the source of the class's module to see that its attention can be replaced.
    return type(f"{base.__name__}Policy", (mixin, base), {"__module__": base.__module__})
