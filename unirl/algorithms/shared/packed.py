"""Sums, means and running sums within the rows of packed values, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def row_of(offsets: Tensor) -> Tensor:
    """[sum L] int64 the row of each token, from row boundaries [B + 1]; on their device."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


@dataclass(frozen=True)
class RowOffsets:
    """Which row each packed token belongs to, and whether it counts. Every sum is over tokens that count.

    Values must be finite: whoever packs them puts 0 where a token does not count.
    """

    row: Tensor  # [sum L] int64, the row of each token
    starts: Tensor  # [B] int64, where each row begins
    token_mask: Tensor  # [sum L] bool
    lengths: Tensor  # [B] float64, tokens that count

    @staticmethod
    def of(offsets: Tensor, mask: Tensor, live: Tensor) -> RowOffsets:
        """From row boundaries [B + 1], the tokens that may count [sum L] bool, and the rows that count [B] bool."""
        row = row_of(offsets).to(mask.device)
        token_mask = mask & live[row]
        lengths = torch.zeros(len(live), dtype=torch.float64, device=mask.device).index_add(0, row, token_mask.double())
        return RowOffsets(row, offsets[:-1].to(mask.device), token_mask, lengths)

    def masked(self, values: Tensor) -> Tensor:
        """[sum L] the values of tokens that count, with their gradient; 0 elsewhere, whatever stood there."""
        return torch.where(self.token_mask, values, 0.0)

    def sum(self, values: Tensor) -> Tensor:
        """[B] float64"""
        return torch.zeros_like(self.lengths).index_add(0, self.row, values.double() * self.token_mask)

    def mean(self, values: Tensor) -> Tensor:
        """[B] float64; 0 for a row without a token that counts."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def spread(self, per_row: Tensor) -> Tensor:
        """[sum L] each token's row's value."""
        return per_row[self.row]

    def before(self, values: Tensor) -> Tensor:
        """[sum L] float64: the sum over earlier tokens of the row; exactly 0 at its first."""
        running = _with_end((values.double() * self.token_mask).cumsum(0).roll(1))
        running[0] = 0.0
        return running[:-1] - self.spread(running[self.starts])

    def rest(self, values: Tensor) -> Tensor:
        """[sum L] float64: the sum over this token and the later ones of the row."""
        return self.spread(self.sum(values)) - self.before(values)

    def quantile(self, values: Tensor, q: float) -> Tensor:
        """[B] float64: the q-quantile within each row, linear between the two nearest; 0 for a row without tokens."""
        order = values.double().masked_fill(~self.token_mask, torch.inf).argsort(stable=True)
        order = order[self.row[order].argsort(stable=True)]  # by row, by value within it, those that count first
        ranked = _with_end(values.double()[order])
        place = q * (self.lengths - 1.0).clamp(min=0.0)
        low, high = self.starts + place.floor().long(), self.starts + place.ceil().long()
        return torch.where(self.lengths > 0, torch.lerp(ranked[low], ranked[high], place - place.floor()), 0.0)


def _with_end(values: Tensor) -> Tensor:
    """`values` and a 0: a row without tokens may begin at their end."""
    return torch.cat([values, values.new_zeros(1)])


Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

NORMED: Aggregation = "seq-mean-token-sum-norm"
"""The rule that divides by a horizon."""


def token_shares(rule: Aggregation, rows: RowOffsets, row_weight: Tensor, horizon: int | None) -> Tensor:
    """[sum L] float64: what a token's loss is multiplied by, w_i share_it; 0 where a token does not count.

    share = 1 for token-mean and seq-mean-token-sum, 1 / n_i for seq-mean-token-mean, 1 / H for seq-mean-token-sum-norm;
    n_i = tokens of row i that count, H = horizon.
    """
    per_row = row_weight.double()
    if rule == "seq-mean-token-mean":
        per_row = per_row / rows.lengths.clamp(min=1.0)
    if rule == NORMED:
        assert horizon is not None, f"{NORMED} needs a horizon"
        per_row = per_row / horizon
    return torch.where(rows.token_mask, rows.spread(per_row), 0.0)


def token_count(rule: Aggregation, rows: RowOffsets, row_weight: Tensor) -> Tensor:
    """[] float64: tokens for token-mean, sequences for all others, each times its row's weight."""
    per_row = rows.lengths if rule == "token-mean" else torch.ones_like(rows.lengths)
    return (row_weight.double() * per_row).sum()
