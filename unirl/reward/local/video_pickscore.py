"""PickScore of videos: the agreement of the frames of a video with its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unirl.reward.base import CLIP_H, RewardScorer, single
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.reward.local.shared.images import evenly_spaced, video_frames
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


@dataclass(frozen=True, kw_only=True)
class VideoPickScoreSpec(PickScoreSpec):
    num_frames: int = 8
    """Number of frames that are scored: the middles of equal parts of the video, or all frames of a shorter one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_frames < 1:
            raise ValueError(f"VideoPickScoreSpec.num_frames must be >= 1, got {self.num_frames}")


class VideoPickScoreRewardScorer(RewardScorer):
    """The mean PickScore (`pickscore.py`) of evenly spaced frames with the video's prompt."""

    cost = CLIP_H.on_frames(VideoPickScoreSpec.num_frames)
    reads = ("prompts", "videos")
    reads_levels = True
    capabilities = Capabilities(modalities=("video",))

    def __init__(self, *, config: VideoPickScoreSpec = VideoPickScoreSpec()) -> None:
        self.config = config
        self.frame_scorer = PickScoreRewardScorer(config=config)
        self.parts = (self.frame_scorer,)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.prompts is not None
        scores = []
        for (sample, frames), prompt in zip(video_frames(request, at_least=1), request.prompts, strict=True):
            chosen = evenly_spaced(len(frames), self.config.num_frames)
            ids = [f"{sample} frame {number}" for number in chosen]
            frame_request = RewardRequest(sample_ids=ids, prompts=[prompt] * len(ids), images=frames[chosen])
            scores.append(self.frame_scorer.score(frame_request).total.mean())
        return single("video_pickscore", torch.stack(scores))
