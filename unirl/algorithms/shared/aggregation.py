"""From one loss per token to one number: each rule is a weight per token, and a count to divide by.

    loss = sum over rows i and tokens t of  w_i share_it loss_it  /  count

Both are sums over rows, so any cut into micro-batches and ranks gives the same number. A row without a token that
counts is a sequence that contributes 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.shared.packed import PackedRows

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

NORMED: Aggregation = "seq-mean-token-sum-norm"
"""The rule that divides by a horizon."""


def token_shares(rule: Aggregation, rows: PackedRows, row_weight: Tensor, horizon: int | None) -> Tensor:
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
    return torch.where(rows.counts, rows.spread(per_row), 0.0)


def token_count(rule: Aggregation, rows: PackedRows, row_weight: Tensor) -> Tensor:
    """[] float64: tokens for token-mean, sequences for all others, each times its row's weight."""
    per_row = rows.lengths if rule == "token-mean" else torch.ones_like(rows.lengths)
    return (row_weight.double() * per_row).sum()
