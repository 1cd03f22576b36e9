"""What a network is conditioned on, as it is fed to the network."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.types.batch import Batch, row


@dataclass(kw_only=True, eq=False)
class TextEmbedCondition(Batch):
    """Text embeddings: per token, and pooled where the family uses it."""

    embeds: Tensor = row(heavy=True)  # [B, L, D]
    pooled: Tensor | None = row(heavy=True, optional=True)  # [B, D']
    mask: Tensor | None = row(heavy=True, optional=True)  # [B, L], True at real tokens


Conditions = dict[str, Batch]
"""The conditions of a track by name: `text`, and `negative_text` when guidance needs it."""
