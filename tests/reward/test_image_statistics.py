"""File size and brightness are what PIL and the definition of luma say."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageStat

from unirl.reward.local.image_statistics import (
    BrightnessRewardScorer,
    JpegCompressibilityRewardScorer,
    JpegIncompressibilityRewardScorer,
    JpegSpec,
)
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest


def request():
    rng = np.random.default_rng(0)
    levels = np.stack([rng.integers(0, 256, (3, 32, 48)), np.full((3, 32, 48), 200), np.zeros((3, 32, 48))])
    return RewardRequest(sample_ids=["noise", "gray", "black"], images=torch.from_numpy(levels).float() / 255)


def pil_images():
    return [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in request().images]


@pytest.mark.parametrize("quality", [30, 95])
def test_sizes_are_those_of_files_that_pil_writes(tmp_path, quality):
    scores = JpegIncompressibilityRewardScorer(config=JpegSpec(quality=quality)).score(request()).total
    for image, score in zip(pil_images(), scores.tolist(), strict=True):
        image.save(tmp_path / "x.jpg", quality=quality)
        assert score == pytest.approx((tmp_path / "x.jpg").stat().st_size / 1000)


def test_compressibility_is_the_negative_size():
    more, less = (
        JpegIncompressibilityRewardScorer().score(request()),
        JpegCompressibilityRewardScorer().score(request()),
    )
    assert torch.equal(more.total, -less.total)
    assert more.total.argmax() == 0 and less.total.argmin() == 0


def test_brightness_is_the_mean_of_pil_luma():
    scores = BrightnessRewardScorer().score(request()).total
    expected = [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in pil_images()]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "scorer", [JpegIncompressibilityRewardScorer(), JpegCompressibilityRewardScorer(), BrightnessRewardScorer()]
)
def test_scores_do_not_depend_on_order_or_batch_size(scorer):
    check_reward(scorer, request())


def test_a_quality_that_jpeg_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"quality must lie in 1\.\.95, got 0"):
        JpegSpec(quality=0)
