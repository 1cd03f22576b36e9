"""A picture is brought to a size without stretching or padding: its middle, at the scale that just covers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from unirl.models.images import fit_image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def ramps(width: int, height: int) -> Image.Image:
    """Red rises from left to right and green from top to bottom, one level a pixel."""
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([columns, rows, rows * 0], axis=-1).astype(np.uint8))


def test_an_image_of_the_size_stays_as_it_is() -> None:
    picture = noise(17, 11)
    result = fit_image(picture, 11, 17)
    assert result.shape == (3, 11, 17) and result.dtype == torch.float32 and result.is_contiguous()
    assert torch.equal((result * 255).round().byte().permute(1, 2, 0), torch.from_numpy(np.array(picture)))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(1, 40))
def test_one_color_stays_that_color_so_nothing_is_padded(width, height, new_width, new_height) -> None:
    result = fit_image(Image.new("RGB", (width, height), (255, 128, 3)), new_height, new_width)
    expected = torch.tensor([255.0, 128.0, 3.0])[:, None, None].expand(3, new_height, new_width)
    assert torch.equal(result * 255, expected)


@pytest.mark.parametrize(("height", "width"), [(50, 120), (120, 50), (90, 90), (30, 30)])
def test_nothing_is_stretched_and_the_middle_is_kept(height, width) -> None:
    result = fit_image(ramps(240, 180), height, width).double() * 255
    scale = min(240 / width, 180 / height)
    inner = (slice(height // 4, -(height // 4)), slice(width // 4, -(width // 4)))  # away from the edges' filter
    along, down = result[0][inner].diff(dim=1).mean(), result[1][inner].diff(dim=0).mean()
    assert along == pytest.approx(scale, rel=0.03) and down == pytest.approx(scale, rel=0.03)
    assert result[0].mean() == pytest.approx(119.5, abs=0.6) and result[1].mean() == pytest.approx(89.5, abs=0.6)


@given(seed=st.integers(0, 5), height=st.integers(3, 20), width=st.integers(3, 20))
def test_a_mirrored_image_gives_the_mirrored_one(seed, height, width) -> None:
    picture = noise(23, 15, seed)
    for flip, side in ((Image.Transpose.FLIP_LEFT_RIGHT, 2), (Image.Transpose.FLIP_TOP_BOTTOM, 1)):
        other = fit_image(picture.transpose(flip), height, width).flip(side)
        assert (other - fit_image(picture, height, width)).abs().max() <= 1.01 / 255


def test_a_square_of_a_wide_image_is_its_middle() -> None:
    picture = noise(30, 10)
    expected = torch.from_numpy(np.array(picture)[:, 10:20])
    assert torch.equal((fit_image(picture, 10, 10) * 255).round().byte().permute(1, 2, 0), expected)
