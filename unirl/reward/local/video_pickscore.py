"""PickScore of videos: how well the frames of a clip fit its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unirl.reward.base import RewardScorer, single
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.reward.local.shared.images import clips, evenly_spaced
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
