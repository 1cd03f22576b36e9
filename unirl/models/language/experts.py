"""The experts of a mixture on the tokens that a router assigned to them. The host does not wait for their numbers.

    x [N, D], experts [N, k] --sorted by expert, padded--> rows [R, D]    expert 0 | expert 1 | ...
    rows --one grouped product for all experts--> [R, D'] --the rows of each token--> [N, k, D']

R follows from N, k and the number of experts, so that no shape depends on a number that only the device knows.

The grouped product of PyTorch reads the weights of all experts from one tensor. Checkpoints, adapters and FSDP2 know
the weights of each expert by a name of their own, so they are copied into one tensor for each product. The backward
pass copies them again: a copy that is kept for it would need as much memory as the weights of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from unirl.models.chunks import round_up

GROUP_MULTIPLE = 8
"""The number of rows of each expert is a positive multiple of this.

On a CPU, a row of a product then has the same bits for any number of rows, and the kernels of a GPU get no empty group.
"""


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all experts, one expert after the other. A token has a row at each of its experts."""

    token: Tensor  # [R] int64, the token of each row. Padding repeats token 0, and nothing reads its output
    ends: Tensor  # [E] int32, the end of the rows of each expert
    place: Tensor  # [N, k] int64, the row of each token at each of its experts

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> Self:
        """The rows for tokens whose experts are `experts` [N, k].

        The number of rows R is an upper bound for any choice of experts. The last expert has the rows that are left.
        """
        chosen, device = experts.flatten(), experts.device
        num_rows = round_up(len(chosen), GROUP_MULTIPLE) + GROUP_MULTIPLE * num_experts
        in_order, order = chosen.sort(stable=True)
        unpadded_ends = torch.searchsorted(in_order, torch.arange(num_experts, device=device), right=True)
        sizes = unpadded_ends.diff(prepend=unpadded_ends.new_zeros(1)).clamp(min=1)
        ends = ((sizes + GROUP_MULTIPLE - 1) // GROUP_MULTIPLE * GROUP_MULTIPLE).cumsum(0)
        padding_before = torch.cat([ends.new_zeros(1), (ends - unpadded_ends)[:-1]])
        pairs = torch.arange(len(chosen), device=device)
        place = torch.empty_like(order).scatter(0, order, pairs + padding_before.index_select(0, in_order))
        token = order.new_zeros(num_rows).scatter(0, place, pairs // experts.shape[1])
        ends[-1:].fill_(num_rows)
        return cls(token, ends.int(), place.unflatten(0, experts.shape))

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each expert, for which the host waits."""
        sizes: list[int] = self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()
        return sizes

    def linear(self, layers: Sequence[nn.Module], rows: Tensor) -> Tensor:
        """[R, D'] from rows [R, D], each through the linear layer of its expert.

        Layers that compute in a way of their own, such as layers with an adapter or with weights in eight bits, run one
        after another. The host then waits for the numbers of their rows.
        """
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        if len(plain) < len(layers):
            parts = zip(layers, rows.split(self.sizes), strict=True)
            return torch.cat([layer(part) for layer, part in parts])
        device = rows.device
        if torch.is_autocast_enabled(device.type):
            rows = rows.to(torch.get_autocast_dtype(device.type))
        else:
            assert rows.dtype == plain[0].weight.dtype, f"{rows.dtype} rows for experts in {plain[0].weight.dtype}"
        result = grouped_product(rows, self.ends, [layer.weight for layer in plain])
        if plain[0].bias is not None:
            biases = torch.stack([layer.bias for layer in plain]).to(rows.dtype)
            of_row = torch.searchsorted(self.ends, torch.arange(len(rows), device=device), right=True)
            result = result + biases.index_select(0, of_row)
        return result


@torch.compiler.disable  # the compiler knows the grouped product in bfloat16 alone
def grouped_product(rows: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[R, D'] from rows [R, D] and the weight [D', D] of each expert, whose rows end at `ends[e]`."""
    result: Tensor = GroupedProduct.apply(rows, ends, *weights)
    return result


class GroupedProduct(torch.autograd.Function):
    """See `grouped_product`. It computes in the dtype of the rows, and gives gradients in that of the weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return grouped_mm(rows, torch.stack(weights).to(rows.dtype).mT, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        needs_rows, _, *needs_weights = ctx.needs_input_grad
        gradient, of_rows = gradient.contiguous(), None
        of_weights: list[Tensor | None] = [None] * len(weights)
        if needs_rows:
            of_rows = grouped_mm(gradient, torch.stack(weights).to(rows.dtype), offs=ends)
        if any(needs_weights):
            of_all = grouped_mm(gradient.mT, rows, offs=ends).to(weights[0].dtype)
            of_weights = [part if needed else None for part, needed in zip(of_all, needs_weights, strict=True)]
        return of_rows, None, *of_weights
