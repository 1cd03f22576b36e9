"""Two transformers that are trained as one module. Each row runs through the expert of its sigma.

rows of one forward   a b c d e        sigma >= boundary: a c d   below: b e
high noise            a c d + a copy   --transformer-->    v
low noise             b e + 2 copies   --transformer_2-->  v
back in order         a b c d e
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.chunks import padded_rows


class WanExperts(nn.Module):
    """diffusers' `transformer` and `transformer_2`. Parameter names begin with these names."""

    def __init__(self, transformer: Any, transformer_2: Any, boundary: float) -> None:
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.boundary = boundary

    def forward(
        self, sigma: Tensor, inputs: dict[str, Tensor | None], *, multiple: int, run_all: bool = False
    ) -> Tensor:
        """v [B, C, F, H, W] of rows at sigma [B].

        Args:
            inputs: arguments of the transformers, one row each.
            multiple: each expert's rows are padded to a multiple of this with copies, so that a row's bits do not
                depend on the sigmas of its neighbours.
            run_all: an expert without rows runs on copies whose result is unused, so its gradient is 0, not absent.
        """
        high = (sigma >= self.boundary).tolist()
        results: list[Tensor] = []
        positions = [0] * len(high)
        for expert, is_high in ((self.transformer, True), (self.transformer_2, False)):
            rows = [row for row, level in enumerate(high) if level == is_high]
            start = sum(len(result) for result in results)
            for i, row in enumerate(rows):
                positions[row] = start + i
            if rows or run_all:
                results.append(_run(expert, inputs, _padded(rows or [0], multiple), len(high)))
        if len(results) == 1 and len(results[0]) == len(high):
            return results[0]
        return torch.cat(results)[positions]


def _padded(rows: list[int], multiple: int) -> list[int]:
    """`rows`, then copies of the first of them up to a multiple."""
    return [rows[i] for i in padded_rows(len(rows), multiple)]


def _run(expert: Any, inputs: dict[str, Tensor | None], rows: list[int], count: int) -> Tensor:
    """The expert's velocity at `rows`, out of `count` rows in total."""
    if rows != list(range(count)):
        inputs = {name: None if value is None else value[rows] for name, value in inputs.items()}
    v: Tensor = expert(**inputs, return_dict=False)[0]
    return v
