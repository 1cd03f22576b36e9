"""What a policy over tokens offers to losses: recorded tokens under the current weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from unirl.types.conditions import Conditions
from unirl.types.segments import TextSegment


@dataclass(frozen=True)
class TokenReplay:
    """Recorded tokens under the current weights, packed as their segment is; fp32."""

    logp: Tensor  # [sum L] nats, of log_softmax(logits / temperature): tempered, and never truncated
    entropy: Tensor | None = None  # [sum L] nats, of the same distribution over the vocabulary; only if asked for


class TokenStage(Protocol):
    """A policy over tokens. A row's values do not depend on its neighbours."""

    def replay(self, conditions: Conditions, segment: TextSegment, *, entropy: bool = False) -> TokenReplay:
        """Log-probs of all tokens of `segment`, context ones too, in one forward; with gradients if enabled.

        The temperature is the segment's own. top_p and top_k shaped the sample, and no log-prob: an engine that
        renormalises what it kept reports another policy's log-probs.
        """
        ...
