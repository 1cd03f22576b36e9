"""Packed rows: sums within rows in float64, and aggregation of token losses.

Packed values have shape [sum L]: the tokens of all rows end to end. `offsets` [B + 1] says where each row begins.

Aggregation turns one loss per token into one number. Each rule is a share per token and a count to divide by:

    loss = sum over rows i and tokens t of  weight_i share_it loss_it  /  count

Numerator and count are sums over rows, so every division into micro-batches and ranks gives the same number. A row
without a counted token is a sequence that contributes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unirl.types.device import to_device

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

NORMED: Aggregation = "seq-mean-token-sum-norm"
"""The rule that divides by a horizon."""


def row_of(offsets: Int[Tensor, "boundaries"]) -> Int[Tensor, "sum_L"]:
    """[sum L] int64 row number of each token, from row boundaries [B + 1]; on the device of the boundaries."""
    return torch.repeat_interleave(offsets.diff())


@dataclass(frozen=True)
class RowOffsets:
    """The row of each packed token, and which tokens are counted. All sums are over counted tokens.

    Values must be finite: the caller sets them to 0 at tokens that are not counted.
    """

    row: Tensor  # [sum L] int64, the row of each token
    starts: Tensor  # [B] int64, the position of each row's first token
    token_mask: Tensor  # [sum L] bool, True = the token is counted
    lengths: Tensor  # [B] float64, counted tokens per row

    @staticmethod
    def of(offsets: Int[Tensor, "boundaries"], mask: Bool[Tensor, "sum_L"], live: Bool[Tensor, "B"]) -> RowOffsets:
        """The rows with boundaries `offsets` [B + 1]. Tokens of `mask` in rows of `live` are counted."""
        row = to_device(row_of(offsets), mask.device)
        token_mask = mask & live.index_select(0, row)
        lengths = torch.zeros(len(live), dtype=torch.float64, device=mask.device).index_add(0, row, token_mask.double())
        return RowOffsets(row, to_device(offsets[:-1], mask.device), token_mask, lengths)

    def masked(self, values: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
        """[sum L] `values` at counted tokens, with their gradient; 0 elsewhere, even where `values` is not finite."""
        return values.masked_fill(~self.token_mask, 0.0)

    def sum(self, values: Float[Tensor, "sum_L"]) -> Float[Tensor, "B"]:
        """[B] float64 sum of each row."""
        return torch.zeros_like(self.lengths).index_add(0, self.row, values.double() * self.token_mask)

    def mean(self, values: Float[Tensor, "sum_L"]) -> Float[Tensor, "B"]:
        """[B] float64 mean of each row; 0 for a row without a counted token."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def spread(self, per_row: Shaped[Tensor, "B"]) -> Shaped[Tensor, "sum_L"]:
        """[sum L] the value of each token's row, from `per_row` [B]."""
        return per_row.index_select(0, self.row)

    def before(self, values: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
        """[sum L] float64 sum over the earlier tokens of the same row; exactly 0 at the first token."""
        running = with_zero_appended((values.double() * self.token_mask).cumsum(0).roll(1))
        running[0] = 0.0
        return running[:-1] - self.spread(running[self.starts])

    def rest(self, values: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
        """[sum L] float64 sum over this token and the later tokens of the same row."""
        return self.spread(self.sum(values)) - self.before(values)

    def quantile(self, values: Float[Tensor, "sum_L"], q: float) -> Float[Tensor, "B"]:
        """[B] float64 q-quantile of each row, interpolated linearly; 0 for a row without a counted token."""
        order = values.double().masked_fill(~self.token_mask, torch.inf).argsort(stable=True)
        order = order[self.row[order].argsort(stable=True)]  # by row, then by value; counted tokens first in each row
        ranked = with_zero_appended(values.double()[order])
        place = q * (self.lengths - 1.0).clamp(min=0.0)
        low, high = self.starts + place.floor().long(), self.starts + place.ceil().long()
        return torch.where(self.lengths > 0, torch.lerp(ranked[low], ranked[high], place - place.floor()), 0.0)


def with_zero_appended(values: Shaped[Tensor, "sum_L"]) -> Shaped[Tensor, "sum_L+1"]:
    """`values` and a final 0: an empty last row starts after the last token, and a maximum exists without tokens."""
    return torch.cat([values, values.new_zeros(1)])


def token_shares(
    rule: Aggregation, rows: RowOffsets, row_weight: Float[Tensor, "B"], horizon: int | None
) -> Float[Tensor, "sum_L"]:
    """[sum L] float64 weight_i share_it, the factor of each token's loss; 0 at tokens that are not counted.

    share = 1 for token-mean and seq-mean-token-sum, 1 / n_i for seq-mean-token-mean, 1 / H for seq-mean-token-sum-norm;
    n_i = counted tokens of row i, H = horizon.
    """
    per_row = row_weight.double()
    if rule == "seq-mean-token-mean":
        per_row = per_row / rows.lengths.clamp(min=1.0)
    if rule == NORMED:
        assert horizon is not None, f"{NORMED} needs a horizon"
        per_row = per_row / horizon
    return rows.masked(rows.spread(per_row))


def token_count(rule: Aggregation, rows: RowOffsets, row_weight: Float[Tensor, "B"]) -> Float[Tensor, ""]:
    """[] float64 number of tokens for token-mean, of sequences for the other rules, each times its row's weight [B]."""
    per_row = rows.lengths if rule == "token-mean" else torch.ones_like(rows.lengths)
    return (row_weight.double() * per_row).sum()
