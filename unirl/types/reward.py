"""What a scorer is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.types.primitives import Videos


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """Rows to score. A scorer gets only the columns that it `reads`; the others are None."""

    sample_ids: Sequence[str]
    prompts: Sequence[str] | None = None
    images: Tensor | None = None  # [B, 3, H, W] in [0, 1]
    videos: Videos | None = None  # frames [sum F, 3, H, W] in [0, 1], laid end to end
    texts: Sequence[str] | None = None  # generated text
    metadata: Sequence[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)


@dataclass(frozen=True, kw_only=True)
class RewardResponse:
    """Component scores per row, in the order of the request, and the weighted total that becomes the reward."""

    total: Tensor  # [B] float32
    components: dict[str, Tensor]  # name -> [B] float32
