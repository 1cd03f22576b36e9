"""How smoothly a clip moves: neither frozen, nor flickering, nor cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.reward.base import RewardScorer, single
from unirl.reward.local.shared.images import clips
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


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
