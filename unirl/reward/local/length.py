"""What becomes of a reward when the response is too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.reward.base import RewardScorer
from unirl.reward.scoring import check_prompt, check_start, name_of, response_of
from unirl.types.protocols import Capabilities, Scorer
from unirl.types.reward import ResponseLength, RewardRequest, RewardResponse


@dataclass(frozen=True, kw_only=True)
class LengthSpec:
    """What a long response costs."""

    truncated: Literal["zero", "keep", "soft"] = "zero"
    """zero: a response that was cut off has the reward 0. keep: it keeps its own. soft: DAPO's penalty is added."""
    buffer: int = 4096
    """soft: the penalty begins so many tokens before the limit."""
    factor: float = 1.0
    """soft: the penalty at the limit."""

    toy: ClassVar[Mapping[str, object]] = {"buffer": 4}

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ValueError(f"LengthSpec.buffer must be >= 1 token, got {self.buffer}")
        if self.factor < 0:
            raise ValueError(f"LengthSpec.factor must be >= 0, got {self.factor}; it is taken away from the reward")


class LengthRewardScorer(RewardScorer):
    """The total of a scorer of texts, shaped by the length of the response; its components stay what they are.

    Further components: `truncated`, 1 for a response that was cut off at its limit; `length_penalty`, what the length
    changed.
    """

    capabilities = Capabilities(modalities=("text",))

    def __init__(self, *, scorer: Scorer, config: LengthSpec = LengthSpec()) -> None:
        self.scorer, self.config = scorer, config
        self.reads = tuple(dict.fromkeys((*scorer.reads, "lengths")))
        self.capabilities = scorer.capabilities

    def score(self, request: RewardRequest) -> RewardResponse:
        lengths = request.lengths
        assert lengths is not None
        answer = response_of(self.scorer, request, name_of(self.scorer))
        penalty = self._penalty(answer.total, lengths)
        truncated = torch.tensor([float(length.truncated) for length in lengths])
        return RewardResponse(
            total=answer.total + penalty,
            components=answer.components | {"truncated": truncated, "length_penalty": penalty},
            logged_rewards=answer.logged_rewards,
            failures=answer.failures,
            answers=answer.answers,
        )

    def _penalty(self, total: Tensor, lengths: Sequence[ResponseLength]) -> Tensor:
        """[B] what is added to `total`."""
        if self.config.truncated == "soft":
            tokens = torch.tensor([length.tokens for length in lengths])
            limits = torch.tensor([length.limit for length in lengths])
            return overlong_penalty(tokens, limits, self.config.buffer, self.config.factor).float()
        cut = torch.tensor([length.truncated and self.config.truncated == "zero" for length in lengths])
        return torch.where(cut, -total, 0.0)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        check_prompt(self.scorer, prompt, metadata)

    def check_start(self) -> None:
        check_start(self.scorer)

    def offload(self) -> None:
        self.scorer.offload()

    def onload(self) -> None:
        self.scorer.onload()


def overlong_penalty(lengths: Tensor, limits: Tensor, buffer: int, factor: float = 1.0) -> Tensor:
    """[B] <= 0, to be added to rewards: 0 up to limit - buffer, then linear, -factor from the limit on.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    Args:
        lengths: [B] tokens per response.
        limits: [B] tokens at which each was to stop.

    Raises:
        ValueError: the buffer is longer than the longest response.
    """
    if not 0 < buffer <= int(limits.min()):
        raise ValueError(f"the buffer must lie in 1..{int(limits.min())}, the longest response, got {buffer} tokens")
    over = (lengths.double() - (limits - buffer)) / buffer
    return -factor * over.clamp(0.0, 1.0)
