"""Videos: from what a decoder gives and back, what of them is shown, and that nothing of it is guessed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from unirl.types.batch import concat_rows, take_rows
from unirl.types.primitives import (
    PREVIEW_FRAMES,
    PREVIEW_SIDE,
    ImagePreviews,
    Images,
    VideoPreviews,
    Videos,
    levels_of,
    unit,
)


def decoded(count: int = 2, frames: int = 5, height: int = 6, width: int = 4, seed: int = 0) -> Tensor:
    """Pixels [B, 3, F, H, W] in [0, 1] that lie on no level."""
    return torch.rand(count, 3, frames, height, width, generator=torch.Generator().manual_seed(seed))


def ramp(frames: int, height: int = 2, width: int = 2) -> Videos:
    """One video whose k-th frame has the level k everywhere."""
    levels = torch.arange(frames).view(1, 1, frames, 1, 1).expand(1, 3, frames, height, width)
    return Videos.of(levels / 255)


@pytest.mark.parametrize("frames", [1, 5, 9])
@pytest.mark.parametrize("count", [1, 3])
def test_stacked_gives_back_what_videos_were_made_of_up_to_half_a_level(frames, count):
    pixels = decoded(count, frames)
    kept = pixels.clone()
    videos = Videos.of(pixels)
    torch.testing.assert_close(unit(videos.stacked()), pixels, atol=0.5 / 255 + 1e-6, rtol=0)
    assert videos.stacked().shape == pixels.shape and torch.equal(pixels, kept)
    assert len(videos) == count and videos.frames.shape == (count * frames, 3, 6, 4)


def test_every_level_survives_storage_and_pixels_are_read_as_the_nearest_level_divided_by_255():
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(levels_of(unit(levels)), levels)
    pixels = decoded()
    rounded = pixels.mul(255).round_().div_(255)
    assert torch.equal(unit(Videos.of(pixels).stacked()), rounded)
    assert torch.equal(unit(Images.of(pixels[:, :, 0]).pixels), rounded[:, :, 0])


def test_frames_come_first_and_are_rounded_as_pictures_are():
    pixels = decoded()
    videos = Videos.of(pixels)
    for b in range(2):
        for f in range(5):
            frame = videos.frames[videos.offsets[b] + f]
            assert torch.equal(frame, ImagePreviews.of(pixels[b : b + 1, :, f]).pixels[0])
    assert torch.equal(Videos.of(videos.stacked()).frames, videos.frames)


def test_videos_of_different_lengths_do_not_stack_and_keep_their_frames():
    joined = Videos.concat([ramp(3), ramp(5)])
    with pytest.raises(ValueError, match=r"videos of \[3, 5\] frames cannot be stacked"):
        joined.stacked()
    assert torch.equal(joined.select([1]).stacked(), ramp(5).stacked())


def test_frames_per_second_are_16_unless_said_and_the_same_for_all():
    assert ramp(3).fps == 16.0
    with pytest.raises(ValueError, match=r"Videos.fps has one value for all rows, .* 16.0 and 24.0"):
        Videos.concat([ramp(3), ramp(3).replace(fps=24.0)])
    for fps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"Videos.fps must be"):
            Videos.of(decoded(), fps=fps)


@pytest.mark.parametrize(
    ("frames", "distance"), [(1, 1), (5, 1), (33, 1), (34, 2), (65, 2), (66, 3), (81, 3), (129, 4), (241, 8)]
)
def test_every_nth_frame_is_shown_and_never_more_than_the_bound(frames, distance):
    clips = ramp(frames).preview()
    levels = clips.frames[:, 0, 0, 0].tolist()
    assert levels == list(range(0, frames, distance))[: len(levels)] and len(levels) <= PREVIEW_FRAMES
    assert frames - 1 - levels[-1] < distance
    assert clips.num_frames.tolist() == [frames] and clips.offsets.tolist() == [0, len(levels)]


def test_small_frames_are_shown_exactly_and_large_ones_shrunk_to_the_bound():
    pixels = decoded(frames=3, height=8, width=PREVIEW_SIDE)
    small = Videos.of(pixels).preview()
    assert torch.equal(small.frames, ImagePreviews.of(pixels.transpose(1, 2).flatten(0, 1)).pixels)
    wide = Videos.of(torch.zeros(1, 3, 2, 480, 832)).preview()
    assert (wide.frames.shape[2:], wide.height, wide.width) == ((148, PREVIEW_SIDE), 480, 832)
    tall = Videos.of(torch.full((1, 3, 2, 832, 480), 0.5)).preview()
    assert tall.frames.shape[2:] == (PREVIEW_SIDE, 148) and tall.frames.unique().tolist() == [128]


def test_shrunk_frames_show_means_over_what_they_stand_for():
    """Blocks of 16 pixels, shrunk by 2: inside a block nothing but its level can be seen."""
    blocks = decoded(1, 1, 32, 32).repeat_interleave(16, 3).repeat_interleave(16, 4)
    clips = Videos.of(blocks).preview()
    means = avg_pool2d(blocks[:, :, 0], 2)
    inside = clips.frames[0].float() / 255 - means[0]
    assert inside.unflatten(1, (32, 8)).unflatten(3, (32, 8))[:, :, 2:6, :, 2:6].abs().max() < 1 / 255


def test_previews_of_several_workers_join_and_reorder():
    parts = [Videos.concat([ramp(3), ramp(40)]).preview(), ramp(5).preview()]
    clips = take_rows(concat_rows(parts), [2, 0, 1])
    assert isinstance(clips, VideoPreviews)
    assert clips.num_frames.tolist() == [5, 3, 40] and clips.offsets.tolist() == [0, 5, 8, 28]
    assert clips.frames[:, 0, 0, 0].tolist() == [*range(5), *range(3), *range(0, 40, 2)]
    assert len(ramp(3).select([]).preview()) == 0
