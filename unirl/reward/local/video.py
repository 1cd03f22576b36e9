"""Rewards of videos: PickScore over evenly spaced frames, and how smoothly a clip moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer, single
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


@dataclass(frozen=True, kw_only=True)
class VideoPickScoreSpec(PickScoreSpec):
    """Which CLIP, how many frames of a clip, and how many frames at a time."""

    num_frames: int = 8
    """Frames that are scored: the middles of as many equal parts of the clip, or all frames of a shorter one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_frames < 1:
            raise ValueError(f"VideoPickScoreSpec.num_frames must be >= 1, got {self.num_frames}")


class VideoPickScoreRewardScorer(RewardScorer):
    """The mean PickScore (`pickscore.py`) of evenly spaced frames with the clip's prompt."""

    reads = ("prompts", "videos")
    capabilities = Capabilities(modalities=("video",))

    def __init__(self, *, config: VideoPickScoreSpec = VideoPickScoreSpec()) -> None:
        self.config = config
        self.frame_scorer = PickScoreRewardScorer(config=config)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.prompts is not None
        scores = []
        for (sample, frames), prompt in zip(clips(request, at_least=1), request.prompts, strict=True):
            chosen = evenly_spaced(len(frames), self.config.num_frames)
            ids = [f"{sample} frame {number}" for number in chosen]
            pictures = RewardRequest(sample_ids=ids, prompts=[prompt] * len(ids), images=frames[chosen])
            scores.append(self.frame_scorer.score(pictures).total.mean())
        return single("video_pickscore", torch.stack(scores))

    def offload(self) -> None:
        self.frame_scorer.offload()

    def onload(self) -> None:
        self.frame_scorer.onload()


@dataclass(frozen=True, kw_only=True)
class TemporalConsistencySpec:
    """At which scale motion is looked at, and how much of it is asked."""

    side: int = 32
    """Frames are averaged down to so many pixels on the shorter side, so that fine texture may move too."""
    motion: float = 0.005
    """Mean change of a pixel per frame, of the whole range, from which a clip counts as moving."""

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ValueError(f"TemporalConsistencySpec.side must be >= 1, got {self.side}")
        if not 0 < self.motion < 1:
            raise ValueError(f"TemporalConsistencySpec.motion must lie between 0 and 1, got {self.motion}")


class TemporalConsistencyRewardScorer(RewardScorer):
    """How straight a clip moves, in [-1, 1]: `temporal_consistency`. It looks at motion alone, not at what is shown."""

    reads = ("videos",)
    capabilities = Capabilities(modalities=("video",))

    def __init__(self, *, config: TemporalConsistencySpec = TemporalConsistencySpec()) -> None:
        self.config = config

    def score(self, request: RewardRequest) -> RewardResponse:
        scores = [
            temporal_consistency(averaged_down(frames.float(), self.config.side), self.config.motion)
            for _, frames in clips(request, at_least=3)
        ]
        return single("temporal_consistency", torch.stack(scores))


def temporal_consistency(frames: Tensor, motion: float) -> Tensor:
    """[] how straight frames [F, ...] move from each to the next but one; F is at least 3.

    mean over t of  (d(x_t, x_{t+2}) - M_t) / max(M_t, motion),  M_t = max(d(x_t, x_{t+1}), d(x_{t+1}, x_{t+2}))

    with d the mean absolute difference. By the triangle inequality d(x_t, x_{t+2}) <= 2 M_t, with equality when every
    element goes on in its direction, evenly. So steady motion gives 1, and M / motion when it is slower than `motion`;
    frames that have nothing to do with each other about 0; back and forth -1. A frozen clip gives 0, and so do stills
    that follow each other by cuts.
    """
    steps = (frames[1:] - frames[:-1]).abs().flatten(1).mean(dim=1)
    strides = (frames[2:] - frames[:-2]).abs().flatten(1).mean(dim=1)
    largest = torch.maximum(steps[1:], steps[:-1])
    return ((strides - largest) / largest.clamp(min=motion)).mean()


def averaged_down(frames: Tensor, side: int) -> Tensor:
    """[F, 3, h, w] frames [F, 3, H, W] as means over areas, `side` pixels on the shorter side; smaller ones stay."""
    height, width = frames.shape[-2:]
    scale = side / min(height, width)
    if scale >= 1:
        return frames
    return nn.functional.adaptive_avg_pool2d(frames, (round(height * scale), round(width * scale)))


def evenly_spaced(count: int, chosen: int) -> list[int]:
    """The middles of `chosen` equal parts of 0 .. count - 1; all of them when there are no more than that."""
    if count <= chosen:
        return list(range(count))
    return [(2 * part + 1) * count // (2 * chosen) for part in range(chosen)]


def clips(request: RewardRequest, at_least: int) -> Iterator[tuple[str, Tensor]]:
    """The sample id and the frames [F, 3, H, W] of every row.

    Raises:
        RewardError: 6002 naming the sample with fewer than `at_least` frames.
    """
    assert request.videos is not None
    bounds: Sequence[int] = request.videos.offsets.tolist()
    for sample, start, stop in zip(request.sample_ids, bounds[:-1], bounds[1:], strict=True):
        if stop - start < at_least:
            raise RewardError(
                f"sample {sample!r} is a clip of {stop - start} frames, and this reward needs at least {at_least}: "
                "set sampling.num_frames higher, or choose another reward",
                code=6002,
            )
        yield sample, request.videos.frames[start:stop]
