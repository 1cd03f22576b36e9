"""Frames of a clip are scored like pictures; smooth motion beats both a frozen clip and flicker."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from unirl.config.errors import RewardError
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.reward.local.shared.images import evenly_spaced
from unirl.reward.local.temporal_consistency import (
    TemporalConsistencyRewardScorer,
    TemporalConsistencySpec,
    averaged_down,
    temporal_consistency,
)
from unirl.reward.local.video_pickscore import VideoPickScoreRewardScorer, VideoPickScoreSpec
from unirl.reward.service import RewardService
from unirl.testing.reward import check_reward
from unirl.types.primitives import Texts, Videos
from unirl.types.reward import RewardRequest
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

MOTION = TemporalConsistencySpec().motion
TOY = {"path": "toy", "batch_size": 4, "device": "cpu"}


def request(*clips: Tensor) -> RewardRequest:
    offsets = torch.tensor([0, *(len(clip) for clip in clips)]).cumsum(0)
    names = [f"s{i}" for i in range(len(clips))]
    prompts = [f"clip number {i}" for i in range(len(clips))]
    return RewardRequest(sample_ids=names, prompts=prompts, videos=Videos(frames=torch.cat(clips), offsets=offsets))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def moving_bar(step: int, count: int = 8, side: int = 32) -> Tensor:
    """[F, 3, S, S] a white bar, 8 pixels wide, that goes `step` pixels to the right each frame."""
    columns = torch.arange(side)
    bars = [((columns >= 2 + step * t) & (columns < 10 + step * t)).float() for t in range(count)]
    return torch.stack([bar.expand(3, side, side) for bar in bars])


def frozen(count: int = 8) -> Tensor:
    return noise(1, 3, 32, 32).expand(count, -1, -1, -1)


def consistency(clip: Tensor, **fields: float) -> float:
    scorer = TemporalConsistencyRewardScorer(config=TemporalConsistencySpec(**fields))
    return float(scorer.score(request(clip)).total[0])


# PickScore of a clip


def test_the_score_of_a_video_is_the_mean_pickscore_of_its_chosen_frames():
    clips = (noise(9, 3, 40, 28), noise(2, 3, 40, 28, seed=1), noise(4, 3, 40, 28, seed=2))
    chosen = ([1, 4, 7], [0, 1], [0, 2, 3])
    result = VideoPickScoreRewardScorer(config=VideoPickScoreSpec(num_frames=3, **TOY)).score(request(*clips)).total
    pickscore = PickScoreRewardScorer(config=PickScoreSpec(**TOY))
    for row, (clip, frames) in enumerate(zip(clips, chosen, strict=True)):
        alone = [
            pickscore.score(RewardRequest(sample_ids=["x"], prompts=[f"clip number {row}"], images=clip[f : f + 1]))
            for f in frames
        ]
        assert float(result[row]) == pytest.approx(sum(float(a.total) for a in alone) / len(frames), abs=1e-6)


@pytest.mark.parametrize(("count", "chosen"), [(1, [0]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 5, 6, 7, 8])])
def test_a_rollout_of_videos_gets_the_mean_pickscore_of_its_frames_with_its_prompt(count, chosen):
    """Frames as the decoder gave them, [B, 3, F, H, W]: the oracle scores them as pictures, one by one."""
    pixels, ids = noise(2, 3, count, 32, 24), ["a@0:0", "b@0:0"]
    req = RolloutReq(
        sample_ids=ids, group_ids=["a@0", "b@0"], primitives={"text": Texts(texts=["a cat", "a dog"])},
        metadata=[{}, {}], tracks={}, purpose="r", step=0,
    )  # fmt: skip
    track = RolloutTrack(
        sample_ids=ids, group_ids=req.group_ids, conditions={}, segment=torch.zeros(2), weight=torch.ones(2),
        decoded=Videos.of(pixels), weight_version=torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip
    service = RewardService(backend=VideoPickScoreRewardScorer(config=VideoPickScoreSpec(**TOY)))
    rewards = service.score_and_attach(req, RolloutResp({"video": track})).tracks["video"].rewards
    pickscore = PickScoreRewardScorer(config=PickScoreSpec(**TOY))
    for row, prompt in enumerate(("a cat", "a dog")):
        frames = pixels[row, :, chosen].transpose(0, 1).mul(255).round().div(255)
        alone = [
            pickscore.score(RewardRequest(sample_ids=["x"], prompts=[prompt], images=frame[None])).total
            for frame in frames
        ]
        assert float(rewards[row]) == pytest.approx(float(torch.stack(alone).mean()), abs=1e-6)


@pytest.mark.parametrize("count", range(1, 30))
@pytest.mark.parametrize("chosen", [1, 2, 5, 8])
def test_frames_are_evenly_spaced_over_the_whole_video(count, chosen):
    frames = evenly_spaced(count, chosen)
    assert len(frames) == len(set(frames)) == min(count, chosen) and set(frames) <= set(range(count))
    gaps = [b - a for a, b in pairwise(frames)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert abs(frames[0] - (count - 1 - frames[-1])) <= 1


def test_every_part_of_a_video_counts():
    """A clip whose first frame is another one's, but whose later frames are not, has another score."""
    one, other = noise(8, 3, 32, 32), noise(8, 3, 32, 32, seed=1)
    mixed = torch.cat([one[:1], other[1:]])
    scores = VideoPickScoreRewardScorer(config=VideoPickScoreSpec(**TOY)).score(request(one, mixed, one)).total
    assert scores[0] != scores[1]


def test_each_video_is_scored_by_itself():
    clips = (noise(9, 3, 32, 32), noise(3, 3, 32, 32, seed=1), noise(5, 3, 32, 32, seed=2))
    check_reward(VideoPickScoreRewardScorer(config=VideoPickScoreSpec(num_frames=4, **TOY)), request(*clips), atol=1e-6)
    check_reward(TemporalConsistencyRewardScorer(), request(*clips))


def test_offloaded_weights_come_back():
    scorer = VideoPickScoreRewardScorer(config=VideoPickScoreSpec(**TOY))
    clip = request(noise(3, 3, 32, 32))
    before = scorer.score(clip).total
    scorer.offload()
    scorer.onload()
    assert torch.equal(scorer.score(clip).total, before)


# Temporal consistency


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_bar_that_moves_evenly_gets_exactly_1(step):
    assert consistency(moving_bar(step)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("count", [5, 9])
def test_even_motion_gets_exactly_1_for_every_number_of_frames_and_one_frame_is_refused(count):
    videos = Videos.of(moving_bar(2, count).transpose(0, 1).expand(2, -1, -1, -1, -1))
    scorer = TemporalConsistencyRewardScorer()
    scores = scorer.score(RewardRequest(sample_ids=["a", "b"], videos=videos)).total
    torch.testing.assert_close(scores, torch.ones(2), atol=1e-5, rtol=0)
    still = Videos.of(moving_bar(2, 1).transpose(0, 1)[None])
    with pytest.raises(RewardError, match="is a video of 1 frames"):
        scorer.score(RewardRequest(sample_ids=["a"], videos=still))


@pytest.mark.parametrize(("speed", "score"), [(2.0, 1.0), (1.0, 1.0), (0.5, 0.5), (0.1, 0.1)])
def test_a_fade_gets_its_speed_over_the_speed_that_counts_as_motion(speed, score):
    clip = (torch.arange(8.0) * speed * MOTION)[:, None, None, None].expand(-1, 3, 32, 32)
    assert consistency(clip) == pytest.approx(score, abs=1e-4)


def test_frozen_is_0_and_below_smooth_motion_which_is_above_every_flicker():
    two = noise(2, 3, 32, 32)
    back_and_forth, unrelated = two[[0, 1] * 4], noise(64, 3, 32, 32)
    shaking = moving_bar(1)[[0, 2, 1, 3, 0, 2, 3, 1]]
    smooth = consistency(moving_bar(1))
    assert consistency(frozen()) == 0.0 < smooth
    assert consistency(back_and_forth) == pytest.approx(-1.0)
    assert -0.1 < consistency(unrelated) <= 0.0
    assert consistency(shaking) < 0.2 < smooth
    assert max(consistency(clip) for clip in (back_and_forth, unrelated, shaking)) < smooth


def test_a_frozen_video_does_not_gain_by_noise_or_by_cuts_between_stills():
    grain = frozen() + 0.004 * (noise(8, 3, 32, 32, seed=5) - 0.5)
    stills = noise(4, 3, 32, 32).repeat_interleave(3, dim=0)
    assert consistency(grain) <= 0.0
    assert abs(consistency(stills)) < 0.05


def test_the_more_flicker_lies_on_motion_the_lower_the_score():
    clip, flicker = moving_bar(1), noise(8, 3, 1, 1) - 0.5
    scores = [consistency(clip + amount * flicker) for amount in (0.0, 0.05, 0.2, 0.8)]
    assert scores == sorted(scores, reverse=True) and scores[0] - scores[-1] > 0.5


def test_forwards_backwards_mirrored_and_inverted_are_the_same():
    clip = moving_bar(1) + 0.1 * noise(8, 3, 32, 32)
    score = consistency(clip)
    for other in (clip.flip(0), clip.flip(3), clip.transpose(2, 3), 1 - clip):
        assert consistency(other) == pytest.approx(score, abs=1e-5)


def test_a_pan_over_the_finest_texture_counts_as_motion_because_frames_are_averaged_down():
    """Means over areas of white noise that shifts by n pixels differ by sqrt(n): 2 steps make sqrt(2) of a stride."""
    texture = noise(3, 256, 320)
    pan = torch.stack([texture[:, :, 2 * t : 2 * t + 256] for t in range(8)])
    assert consistency(pan) == pytest.approx(2**0.5 - 1, abs=0.05)
    assert abs(consistency(pan, side=256)) < 0.02


def test_averaging_down_keeps_means_and_small_frames():
    frames = noise(2, 3, 64, 96)
    assert averaged_down(frames, 32).shape == (2, 3, 32, 48) and averaged_down(frames, 64) is frames
    expected = frames.unflatten(3, (48, 2)).unflatten(2, (32, 2)).mean(dim=(3, 5))
    torch.testing.assert_close(averaged_down(frames, 32), expected)


def test_the_bounds_hold_for_any_video():
    for seed in range(20):
        clip = noise(3 + seed % 5, 2, seed=seed) * noise(1, seed=seed + 100)
        assert -1.0 <= float(temporal_consistency(clip, MOTION)) <= 1.0


def test_a_video_with_too_few_frames_is_an_error_that_names_it():
    with pytest.raises(RewardError, match="'s1' is a video of 2 frames, and this reward needs at least 3") as caught:
        TemporalConsistencyRewardScorer().score(request(noise(4, 3, 8, 8), noise(2, 3, 8, 8)))
    assert caught.value.code == 6002


@pytest.mark.parametrize("fields", [{"side": 0}, {"motion": 0.0}, {"motion": 1.0}])
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=f"TemporalConsistencySpec.{next(iter(fields))} must"):
        TemporalConsistencySpec(**fields)
    with pytest.raises(ValueError, match=r"num_frames must be >= 1, got 0"):
        VideoPickScoreSpec(num_frames=0)
