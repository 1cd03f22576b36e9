"""Keys and values of one forward of a decoder of transformers, to which a later forward attends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WrittenLayers:
    """Takes the place of a cache of transformers, and keeps the keys and values of one forward by their layer.

    Unlike a cache it is not changed when activation checkpointing runs a layer again.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, **options: object) -> tuple[Tensor, Tensor]:
        """The keys and values [N, heads, T, d] that the layer attends to."""
        self.layers.setdefault(layer, (keys, values))
        return keys, values

    def stacked(self, output: Tensor) -> Tensor:
        """[N, 2 L, heads, T, d] keys and values of L layers, in turn.

        Args:
            output: of the forward that wrote them.
        """
        parts = [part for layer in sorted(self.layers) for part in self.layers[layer]]
        tied: Tensor = _Tied.apply(torch.stack(parts, dim=1), output)
        return tied


class _Tied(torch.autograd.Function):
    """`stored` as it is. The gradient also runs, as zeros, into the `output` of the forward that made it.

    Keys and values leave a block beside its output. FSDP2 gathers the weights of a block when the gradient of its
    output arrives, so there must be one, and it must arrive before that of its keys is used.
    """

    @staticmethod
    def forward(ctx: Any, stored: Tensor, output: Tensor) -> Tensor:
        ctx.output = output.shape, output.dtype
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.output
        return gradient, gradient.new_zeros(shape, dtype=dtype)


class ReadLayers(WrittenLayers):
    """The same, where every layer also attends to stored keys and values [N, 2 L, heads, P, d] before its own."""

    def __init__(self, stored: Tensor) -> None:
        super().__init__()
        self.stored = stored

    def update(self, keys: Tensor, values: Tensor, layer: int, **options: object) -> tuple[Tensor, Tensor]:
        super().update(keys, values, layer)
        before = self.stored[:, 2 * layer], self.stored[:, 2 * layer + 1]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
