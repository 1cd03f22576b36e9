"""What a policy over tokens offers to losses: recorded tokens under the current weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from unirl.types.conditions import Conditions
from unirl.types.segments import TextSegment

ValueGradient = Literal["head", "policy"]
"""How far back values are differentiated: within the value head, or on through the policy that its input is from."""


@dataclass(frozen=True)
class TokenReplay:
    """Recorded tokens under the current weights, packed as their segment is; fp32."""

    logp: Tensor  # [sum L] nats, of log_softmax(logits / temperature): tempered, and never truncated
    entropy: Tensor | None = None  # [sum L] nats, of the same distribution over the vocabulary; only if asked for
    values: Tensor | None = None  # [sum L] fp32, V of the state before each token; only if asked for


class TokenStage(Protocol):
    """A policy over tokens. A row's values do not depend on its neighbours."""

    value_head: nn.Module | None
    """What a loss with a critic asks, [N] from hidden states [N, D]; a train backend's."""

    def build_value_head(self, width: int, seed: int) -> nn.Module:
        """A fresh `TokenValueHead` for the hidden states of this policy."""
        ...

    def replay(
        self,
        conditions: Conditions,
        segment: TextSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        """Log-probs of all tokens of `segment`, context ones too, in one forward; with gradients if enabled.

        The temperature is the segment's own. top_p and top_k shaped the sample, and no log-prob: an engine that
        renormalises what it kept reports another policy's log-probs.

        Args:
            values: what the value head says of the hidden states that the logits are made of, and how far back the
                gradient of that goes; absent = the head is not asked.
        """
        ...
