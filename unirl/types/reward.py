"""Requests to a scorer and its responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unirl.types.batch import take_rows
from unirl.types.primitives import Episodes, Metadata, Videos, unit


@dataclass(frozen=True)
class ResponseLength:
    """Length of a generated text."""

    tokens: int
    limit: int
    """The largest number of tokens allowed. A text of this length was truncated."""

    @property
    def truncated(self) -> bool:
        return self.tokens >= self.limit


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """Rows to score. Only the fields that the scorer `reads` are set; the others are None."""

    sample_ids: Sequence[str]
    prompts: Sequence[str] | None = None
    images: Tensor | None = None  # [B, 3, H, W] in [0, 1] on the CPU; uint8 for a scorer that `reads_levels`
    videos: Videos | None = None  # with frames in the same values
    texts: Sequence[str] | None = None  # generated text
    lengths: Sequence[ResponseLength] | None = None  # of the generated texts
    sources: Sequence[Sequence[Tensor]] | None = None  # per row, the images [3, H, W] in [0, 1] of its prompt
    episodes: Episodes | None = None  # what became of the episodes of each row
    metadata: Sequence[Metadata] | None = None
    places: Sequence[str] | None = None  # file and line of each row's prompt, for messages; a scorer gets None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def columns(self, names: Sequence[str], levels: bool) -> RewardRequest:
        """The request with these columns only.

        Args:
            levels: False converts images and videos from uint8 to floats in [0, 1].
        """
        present: dict[str, Any] = {name: getattr(self, name) for name in names}
        if not levels:
            if present.get("images") is not None:
                present["images"] = unit(present["images"])
            if present.get("videos") is not None:
                present["videos"] = present["videos"].map_tensors(unit)
        return RewardRequest(sample_ids=self.sample_ids, **present)

    def select(self, rows: Sequence[int]) -> RewardRequest:
        """The rows `rows`, in that order."""
        present = {name: value for name, value in vars(self).items() if value is not None}
        return RewardRequest(**{name: take_rows(value, rows) for name, value in present.items()})


@dataclass(frozen=True)
class ScoringFailure:
    """The reason why a reward could not score a sample."""

    reward: str
    """The name of the scorer."""
    why: str
    code: int = 6002


Failures = tuple[ScoringFailure, ...]
"""The failures of one sample."""


@dataclass(frozen=True)
class Answer:
    """The answer that a scorer extracted from a response, and its verdict."""

    right: bool
    text: str | None = None
    """Normalised text, equal for equivalent answers; "" = no answer, None = the scorer gives no text."""


@dataclass(frozen=True, kw_only=True)
class RewardResponse:
    """Component scores per row, in the order of the request, and the weighted total that becomes the reward.

    A row that could not be scored has the total NaN, never 0, and an entry in `failures`.
    """

    total: Tensor  # [B] float32
    components: dict[str, Tensor]  # name -> [B] float32
    logged_rewards: dict[str, Tensor] = field(default_factory=dict)  # name -> [B] float32; NaN = not scored
    failures: Mapping[int, Failures] = field(default_factory=dict)
    """Failures by row: first those that cost the row its reward, then those of logged-only rewards."""
    answers: Sequence[Answer | None] | None = None
    """The answer in each row, if the scorer judges answers; None for rows that it did not judge."""

    def failed_rows(self) -> list[int]:
        """Returns the rows whose total is not finite."""
        return [row for row, score in enumerate(self.total.tolist()) if not math.isfinite(score)]
