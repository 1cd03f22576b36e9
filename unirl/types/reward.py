"""What a scorer is asked and what it answers."""

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
    """How long a generated text is."""

    tokens: int
    limit: int
    """Tokens at which generation was to stop; a text that long was cut off."""

    @property
    def truncated(self) -> bool:
        return self.tokens >= self.limit


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """Rows to score. A scorer gets only the columns that it `reads`; the others are None."""

    sample_ids: Sequence[str]
    prompts: Sequence[str] | None = None
    images: Tensor | None = None  # [B, 3, H, W] in [0, 1]
    videos: Videos | None = None  # frames [sum F, 3, H, W] in [0, 1], laid end to end
    texts: Sequence[str] | None = None  # generated text
    lengths: Sequence[ResponseLength] | None = None  # of the generated texts
    sources: Sequence[Sequence[Tensor]] | None = None  # of each row: [3, H, W] in [0, 1], what its prompt brought
    metadata: Sequence[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, rows: Sequence[int]) -> RewardRequest:
        """The rows `rows`, in that order."""

        def column(values: Any) -> Any:
            if values is None:
                return None
            if isinstance(values, Batch):
                return values.select(rows)
            return values[list(rows)] if isinstance(values, Tensor) else [values[row] for row in rows]

        return RewardRequest(**{field.name: column(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class Failure:
    """Why one reward could not score one sample."""

    reward: str
    """The name of the scorer."""
    why: str
    code: int = 6002


Failures = tuple[Failure, ...]
"""Those of one sample."""


@dataclass(frozen=True)
class Answer:
    """What a response answers, as a scorer of right answers reads it."""

    right: bool
    text: str | None = None
    """Equal for answers that are the same; "" = the response gives none; None = this scorer does not say."""


@dataclass(frozen=True, kw_only=True)
class RewardResponse:
    """Component scores per row, in the order of the request, and the weighted total that becomes the reward.

    A row that could not be scored is NaN in the total and says why in `failures`; it is never a zero.
    """

    total: Tensor  # [B] float32
    components: dict[str, Tensor]  # name -> [B] float32
    logged_rewards: dict[str, Tensor] = field(default_factory=dict)  # name -> [B] float32; NaN = not scored
    failures: Mapping[int, Failures] = field(default_factory=dict)
    """Failures by row: first those that cost the row its reward, then those of logged-only rewards."""
    answers: Sequence[Answer | None] | None = None
    """What each row answers, where the score is about right answers (None: of this row nothing is known)."""

    def lost(self) -> list[int]:
        """The rows without a reward."""
        return [row for row, score in enumerate(self.total.tolist()) if not math.isfinite(score)]
