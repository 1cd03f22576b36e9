"""The length of a response: changes another reward, or is a reward itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unirl.reward.base import RewardScorer, single
from unirl.reward.scoring import name_of, response_of
from unirl.types.protocols import Capabilities
from unirl.types.reward import ResponseLength, RewardRequest, RewardResponse


@dataclass(frozen=True, kw_only=True)
class LengthSpec:
    """What happens to the reward of a response that is cut off, or nearly so."""

    truncated: Literal["zero", "keep", "soft"] = "zero"
    """zero: a response that was cut off gets the reward 0. keep: it keeps its reward. soft: DAPO's penalty is added."""
    buffer: int = 4096
    """soft: number of tokens before the limit at which the penalty begins."""
    factor: float = 1.0
    """soft: the penalty at the limit."""

    toy: ClassVar[Mapping[str, object]] = {"buffer": 4}

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ValueError(f"LengthSpec.buffer must be >= 1 token, got {self.buffer}")
        if self.factor < 0:
            raise ValueError(f"LengthSpec.factor must be >= 0, got {self.factor}; it is subtracted from the reward")


class LengthRewardScorer(RewardScorer):
    """The total of a text scorer, changed by the length of the response. The components are unchanged.

    Additional components: `truncated`, 1 for a response that was cut off at its limit, and `length_penalty`, the change
    of the total.
    """

    reads_levels = True
    capabilities = Capabilities(modalities=("text",))

    def __init__(self, *, scorer: RewardScorer, config: LengthSpec = LengthSpec()) -> None:
        self.scorer, self.config, self.parts = scorer, config, (scorer,)
        self.reads = tuple(dict.fromkeys((*scorer.reads, "lengths")))
        self.capabilities = scorer.capabilities

    def score(self, request: RewardRequest) -> RewardResponse:
        lengths = request.lengths
        assert lengths is not None
        response = response_of(self.scorer, request, name_of(self.scorer))
        penalty = self._penalty(response.total, lengths)
        truncated = torch.tensor([float(length.truncated) for length in lengths])
        components = response.components | {"truncated": truncated, "length_penalty": penalty}
        return replace(response, total=response.total + penalty, components=components)

    def _penalty(self, total: Tensor, lengths: Sequence[ResponseLength]) -> Tensor:
        """Returns the change [B] of `total`."""
        if self.config.truncated == "soft":
            tokens = torch.tensor([length.tokens for length in lengths])
            limits = torch.tensor([length.limit for length in lengths])
            return overlong_penalty(tokens, limits, self.config.buffer, self.config.factor).float()
        cut = torch.tensor([length.truncated and self.config.truncated == "zero" for length in lengths])
        return torch.where(cut, -total, 0.0)


@dataclass(frozen=True, kw_only=True)
class TextLengthSpec:
    """The length that costs nothing, and the length at which the reward is -1."""

    max_tokens: int = 256
    """A text of at most so many tokens has the reward 0."""
    buffer: int = 256
    """Tokens beyond `max_tokens` over which the reward falls to -1."""

    toy: ClassVar[Mapping[str, object]] = {"max_tokens": 2, "buffer": 4}

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"TextLengthSpec.max_tokens must be >= 0, got {self.max_tokens}")
        if self.buffer < 1:
            raise ValueError(f"TextLengthSpec.buffer must be >= 1 token, got {self.buffer}")


class TextLengthRewardScorer(RewardScorer):
    """0 for a text that is short enough, then linear in its tokens, down to -1: DAPO's penalty as a reward."""

    reads = ("lengths",)
    capabilities = Capabilities(modalities=("text",))

    def __init__(self, *, config: TextLengthSpec = TextLengthSpec()) -> None:
        self.config = config

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.lengths is not None
        lengths = torch.tensor([length.tokens for length in request.lengths])
        limits = torch.full_like(lengths, self.config.max_tokens + self.config.buffer)
        return single("text_length", overlong_penalty(lengths, limits, self.config.buffer))


def overlong_penalty(lengths: Tensor, limits: Tensor, buffer: int, factor: float = 1.0) -> Tensor:
    """Returns the change [B] <= 0 of rewards: 0 up to limit - buffer, then linear, and -factor from the limit on.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    Args:
        lengths: [B] tokens per response.
        limits: [B] tokens at which each response was cut off.

    Raises:
        ValueError: the buffer is longer than the longest response.
    """
    if not 0 < buffer <= int(limits.min()):
        raise ValueError(f"the buffer must lie in 1..{int(limits.min())}, the longest response, got {buffer} tokens")
    over = (lengths.double() - (limits - buffer)) / buffer
    return -factor * over.clamp(0.0, 1.0)
