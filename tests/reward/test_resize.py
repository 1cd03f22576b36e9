"""Preprocessing on the device, compared with Pillow and with transformers' image processor, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from unirl.reward.local.shared.clip import clip_image_processor
from unirl.reward.local.shared.resize import clip_input, level_values, resized

SIDES = st.integers(3, 90)


def noise(height: int, width: int, seed: int, count: int = 2) -> torch.Tensor:
    """Random levels, with black and white areas where the filter leaves the range of 256 levels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)
    images[..., : height // 2, : width // 2] = 0
    images[..., height // 2 :, : width // 2] = 255
    return images


def as_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(height=SIDES, width=SIDES, tall=SIDES, wide=SIDES, seed=st.integers(0, 99))
def test_a_resize_has_the_bits_of_pillow(height, width, tall, wide, seed):
    images = noise(height, width, seed, count=1)
    rows = as_pil(images[0]).resize((wide, height), Image.Resampling.BICUBIC)  # Pillow 13 may resize columns first
    expected = rows.resize((wide, tall), Image.Resampling.BICUBIC)
    assert np.array_equal(resized(images, tall, wide)[0].permute(1, 2, 0), np.asarray(expected))


@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (48, 64), (64, 48), (33, 70), (96, 48), (32, 32), (20, 20), (37, 32)]
)
def test_the_input_of_clip_has_the_bits_of_the_image_processor(height, width):
    images, processor = noise(height, width, seed=7), clip_image_processor(32)
    expected = processor([as_pil(image) for image in images], return_tensors="pt")["pixel_values"]
    assert torch.equal(clip_input(images, processor, level_values(processor)), expected)
