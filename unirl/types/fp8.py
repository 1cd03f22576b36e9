"""Matrices in eight bits: the weights of linear layers as float8_e4m3fn, with a scale for each row.

    scale = 2^k, the smallest power of two with max |w| <= 448 scale        (448 is the largest float8_e4m3fn)
    w    ~= scale q,  q = w / scale rounded to 4 significant bits,          |w - scale q| <= max(|w| / 16, scale / 1024)

A power of two makes the product scale q exact in float32 and bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from unirl.types.device import multiplies_fp8

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_EXPONENT = -100
"""Rows of smaller numbers become zero."""
PRODUCT_MULTIPLE = 16
"""A product of two FP8 matrices needs multiples of this as numbers of inputs and outputs."""


def row_scales(rows: Tensor) -> Tensor:
    """[R, 1] float32 scales of a matrix [R, C]; 1 for a row of zeros."""
    fraction, exponent = torch.frexp(rows.detach().float().abs().amax(dim=1, keepdim=True) / LARGEST)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(min=SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(fraction), exponent)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """q [R, C] float8_e4m3fn and the scales [R, 1] float32 of a matrix [R, C]."""
    scales = row_scales(rows)
    return (rows.detach().float() / scales).to(FP8), scales


def packed(q: Tensor, scales: Tensor) -> Tensor:
    """[R (C + 4)] uint8, all bytes of a quantised matrix."""
    return torch.cat([q.contiguous().view(torch.uint8).flatten(), scales.contiguous().view(torch.uint8).flatten()])


class Fp8Linear(nn.Linear):
    """A frozen linear layer whose weights are stored in eight bits.

    It computes in the dtype of its input with weights that are expanded for the product. Devices that multiply FP8
    matrices do that instead, for inputs in bfloat16, which are rounded to eight bits with a scale for each token.
    """

    scales: Tensor  # [outputs, 1] float32
    wide_dtype: torch.dtype
    """The dtype of the weights before they were quantised."""

    @classmethod
    def convert(cls, layer: nn.Linear) -> None:
        """Quantise the weights of a layer, in place."""
        assert type(layer) is nn.Linear, f"{type(layer).__name__} computes in its own way"
        wide = layer.weight
        layer.__class__ = cls
        assert isinstance(layer, cls)
        q, scales = quantized(wide)
        layer.wide_dtype = wide.dtype
        layer.weight = nn.Parameter(q, requires_grad=False)
        layer.register_buffer("scales", scales)

    def store(self, values: Tensor) -> None:
        """Take over new weights [outputs, inputs], which are quantised."""
        q, scales = quantized(values.to(self.wide_dtype))
        self.weight.data.copy_(q)
        self.scales.copy_(scales)

    def stored_bytes(self) -> Tensor:
        """[N] uint8, all bytes of the weights."""
        return packed(self.weight.data, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """[..., outputs] of x [..., inputs]."""
        is_aligned = self.in_features % PRODUCT_MULTIPLE == self.out_features % PRODUCT_MULTIPLE == 0
        if x.dtype == torch.bfloat16 and is_aligned and multiplies_fp8(x.device):
            return fp8_product(x, self.weight, self.scales, self.bias)
        return linear(x, self.weight.to(x.dtype) * self.scales.to(x.dtype), self.bias)


def fp8_product(x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """[..., outputs] bfloat16, the product of x [..., inputs] bfloat16, rounded to eight bits, and scales q."""
    tokens = x.flatten(0, -2)
    sizes = tokens.abs().amax(dim=1, keepdim=True).float() / LARGEST
    sizes = torch.where(sizes > 0, sizes, 1.0)
    small = (tokens.float() / sizes).clamp(-LARGEST, LARGEST).to(FP8)
    product = torch._scaled_mm(small, q.t(), scale_a=sizes, scale_b=scales.t(), out_dtype=x.dtype)
    output: Tensor = product if bias is None else product + bias
    return output.view(*x.shape[:-1], -1)
