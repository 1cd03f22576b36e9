"""Temporal consistency: the smoothness of a video's motion. Frozen, flickering and cut videos score low."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.distributed.group.rank import own_device
from unirl.reward.base import RewardScorer, single
from unirl.reward.local.shared.images import video_frames
from unirl.types.primitives import unit
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


@dataclass(frozen=True, kw_only=True)
class TemporalConsistencySpec:
    side: int = 32
    """Frames are downscaled by averaging to this many pixels on the shorter side, which removes fine texture."""
    motion: float = 0.005
    """Mean change of a pixel from frame to frame, in pixel values of [0, 1], from which a video counts as moving."""

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ValueError(f"TemporalConsistencySpec.side must be >= 1, got {self.side}")
        if not 0 < self.motion < 1:
            raise ValueError(f"TemporalConsistencySpec.motion must lie between 0 and 1, got {self.motion}")


class TemporalConsistencyRewardScorer(RewardScorer):
    """The function `temporal_consistency` of the frames, in [-1, 1]. It measures motion alone, not the content."""

    reads = ("videos",)
    reads_levels = True
    capabilities = Capabilities(modalities=("video",))

    def __init__(self, *, config: TemporalConsistencySpec = TemporalConsistencySpec()) -> None:
        self.config = config
        self.device = own_device()

    def score(self, request: RewardRequest) -> RewardResponse:
        scores = [
            temporal_consistency(averaged_down(unit(frames.to(self.device)), self.config.side), self.config.motion)
            for _, frames in video_frames(request, at_least=3)
        ]
        return single("temporal_consistency", torch.stack(scores))


def temporal_consistency(frames: Tensor, motion: float) -> Tensor:
    """Returns how straight the motion of frames [F, ...] is, a scalar; F is at least 3.

    mean over t of  (d(x_t, x_{t+2}) - M_t) / max(M_t, motion),  M_t = max(d(x_t, x_{t+1}), d(x_{t+1}, x_{t+2}))

    where d is the mean absolute difference. The triangle inequality gives d(x_t, x_{t+2}) <= 2 M_t, with equality if
    every element continues in its direction at the same rate. Steady motion therefore gives 1, or M / motion if it is
    slower than `motion`. Unrelated frames give about 0, and motion back and forth gives -1. A frozen video gives 0, and
    so does a sequence of still images with cuts.
    """
    steps = (frames[1:] - frames[:-1]).abs().flatten(1).mean(dim=1)
    strides = (frames[2:] - frames[:-2]).abs().flatten(1).mean(dim=1)
    largest = torch.maximum(steps[1:], steps[:-1])
    return ((strides - largest) / largest.clamp(min=motion)).mean()


def averaged_down(frames: Tensor, side: int) -> Tensor:
    """Returns frames [F, 3, H, W] averaged down to `side` pixels on the shorter side. Smaller frames are unchanged."""
    height, width = frames.shape[-2:]
    scale = side / min(height, width)
    if scale >= 1:
        return frames
    return nn.functional.adaptive_avg_pool2d(frames, (round(height * scale), round(width * scale)))
