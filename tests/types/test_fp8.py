"""Matrices in eight bits: scales by their definition, the bound of the error, and products by their formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from unirl.types.fp8 import FP8, LARGEST, Fp8Linear, fp8_product, packed, quantized, row_scales


def matrix(rows: int = 24, columns: int = 48) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 4, rows)[:, None]


def test_a_scale_is_the_smallest_power_of_two_that_brings_its_row_into_range() -> None:
    w = matrix()
    for row, scale in zip(w.abs().amax(1).tolist(), row_scales(w).flatten().tolist(), strict=True):
        assert math.log2(scale) == round(math.log2(scale))
        assert row <= LARGEST * scale and row > LARGEST * scale / 2


@pytest.mark.parametrize("exponent", [-20, 0, 7])
def test_a_row_that_just_fits_is_not_scaled_further(exponent: int) -> None:
    w = torch.tensor([[LARGEST * 2.0**exponent, 0.0]])
    assert row_scales(w).item() == 2.0**exponent
    q, scales = quantized(w)
    assert torch.equal(q.float() * scales, w)


def test_rows_of_zeros_and_of_tiny_numbers_become_zero() -> None:
    q, scales = quantized(torch.tensor([[0.0, 0.0], [1e-40, -1e-40]]))
    assert torch.equal(q.float() * scales, torch.zeros(2, 2)) and (scales > 0).all()


def test_the_error_keeps_its_bound_and_the_numbers_of_the_format_are_exact() -> None:
    w = matrix()
    q, scales = quantized(w)
    error = (q.float() * scales - w).abs()
    assert (error <= torch.maximum(w.abs() / 16, scales / 1024)).all()
    assert error.max() > 0
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = codes[codes.isfinite()][None] * 2.0**-9
    q, scales = quantized(numbers)
    assert torch.equal(q.float() * scales, numbers)


def test_the_expanded_weights_are_exact_in_bfloat16() -> None:
    q, scales = quantized(matrix())
    assert torch.equal((q.to(torch.bfloat16) * scales.to(torch.bfloat16)).float(), q.float() * scales)


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor]:
    """A linear layer in eight bits, and its weights before."""
    wide = nn.Linear(32, 16, bias=bias).to(dtype)
    w = wide.weight.detach().clone()
    Fp8Linear.convert(wide)
    return wide, w


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_with_its_rounded_weights(bias: bool) -> None:
    converted, w = layer(bias)
    q, scales = quantized(w)
    x = torch.randn(2, 5, 32)
    assert converted.weight.dtype == FP8 and converted.weight.element_size() == 1
    torch.testing.assert_close(converted(x), nn.functional.linear(x, q.float() * scales, converted.bias))


def test_a_layer_takes_over_new_weights_as_if_it_had_been_made_of_them() -> None:
    converted, _ = layer(dtype=torch.bfloat16)
    new = torch.randn(16, 32)
    converted.store(new)
    assert torch.equal(converted.stored_bytes(), packed(*quantized(new.bfloat16())))
    assert len(converted.stored_bytes()) == 16 * (32 + 4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_eight_bit_matrices_is_that_of_the_rounded_values(bias: bool) -> None:
    """The formula in float64: each token and each row of the weights has a scale of its own."""
    q, scales = quantized(matrix(16, 32))
    x = (torch.randn(2, 3, 32) * torch.logspace(-3, 3, 3)[:, None]).bfloat16()
    x[0, 0] = 0.0
    added = torch.randn(16).bfloat16() if bias else None
    sizes = x.double().abs().amax(-1, keepdim=True) / LARGEST
    rounded = (x.double() / sizes.clamp(min=1e-30)).float().to(FP8).double() * sizes
    wanted = rounded @ (q.double() * scales.double()).T + (0.0 if added is None else added.double())
    result = fp8_product(x, q, scales, added)
    assert result.dtype == torch.bfloat16 and result.shape == (2, 3, 16)
    bound = wanted.abs() * 2**-7 + (rounded.abs() @ (q.double() * scales.double()).abs().T) * 2**-8
    assert ((result.double() - wanted).abs() <= bound + 1e-12).all()


def test_only_plain_linear_layers_are_converted() -> None:
    converted, _ = layer()
    with pytest.raises(AssertionError, match="Fp8Linear computes in its own way"):
        Fp8Linear.convert(converted)
