"""Requests to a scorer and its responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from unirl.types.batch import Batch
from unirl.types.primitives import Videos


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
    images: Tensor | None = None  # [B, 3, H, W] in [0, 1]
    videos: Videos | None = None  # frames [sum F, 3, H, W] in [0, 1], laid end to end
    texts: Sequence[str] | None = None  # generated text
    lengths: Sequence[ResponseLength] | None = None  # of the generated texts
    sources: Sequence[Sequence[Tensor]] | None = None  # per row, the images [3, H, W] in [0, 1] of its prompt
    metadata: Sequence[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, rows: Sequence[int]) -> RewardRequest:
        """The rows `rows`, in that order."""

        def selected(values: Any) -> Any:
            if values is None:
                return None
            if isinstance(values, Batch):
                return values.select(rows)
            return values[list(rows)] if isinstance(values, Tensor) else [values[row] for row in rows]

        return RewardRequest(**{field.name: selected(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class Failure:
    """The reason why a reward could not score a sample."""

    reward: str
    """The name of the scorer."""
    why: str
    code: int = 6002


Failures = tuple[Failure, ...]
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
