"""Videos of episodes: which rows of a request are drawn, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import interpolate

from unirl.types.environments import Environment
from unirl.types.primitives import Videos
from unirl.types.rollout_req import RolloutReq
from unirl.types.rows import spread_rows


@dataclass(frozen=True, kw_only=True)
class EpisodeVideos:
    """Videos of the first episodes of some rows, of every evaluation and of some steps of training.

    A frame shows the environment before a decision, the last one shows the end. Drawing takes between 1 and 100 ms per
    frame, the latter without a GPU.
    """

    rows: Annotated[int, Meta(ge=1)] = 4
    """Rows of a request that are drawn, on each device: the first ones of each group."""
    every: Annotated[int, Meta(ge=1)] = 1
    """Decisions between frames."""
    frames: Annotated[int, Meta(ge=2)] = 32
    """Frames of a video, at most. A longer episode keeps every second one, then every fourth one, and so on."""
    size: Annotated[int, Meta(ge=8)] = 256
    """Pixels of the longer side of a frame, at most."""
    steps: Annotated[int, Meta(ge=0)] = 10
    """Episodes of training are drawn every this many steps, as `tracking.sample_steps` keeps samples; 0 = never."""
    fps: Annotated[float, Meta(gt=0)] = 10.0
    """Frames per second of the video files."""

    toy: ClassVar[Mapping[str, object]] = {"rows": 1, "every": 8}

    def rows_of(self, req: RolloutReq) -> Sequence[int]:
        """The rows of a request that are drawn."""
        is_due = req.purpose == "eval" or (self.steps > 0 and (req.step + 1) % self.steps == 0)
        return spread_rows(req.group_ids, self.rows) if is_due else ()


class Camera:
    """The frames of some rows, each during its first episode."""

    def __init__(self, env: Environment, settings: EpisodeVideos, rows: Sequence[int]) -> None:
        self.env, self.settings = env, settings
        self.frames: dict[int, list[Tensor]] = {row: [] for row in rows}  # each frame [3, h, w] uint8
        self.running = set(rows)
        self.stride = settings.every

    def before(self, decision: int) -> None:
        """Draw the rows that are in their first episode, before decision `decision` of all of them."""
        if self.running and decision % self.stride == 0:
            if max(len(self.frames[row]) for row in self.running) >= self.settings.frames - 1:
                self.stride *= 2
                for row in self.running:
                    self.frames[row] = self.frames[row][::2]
                if decision % self.stride:
                    return
            self._draw(sorted(self.running))

    def after(self, rows: Sequence[int]) -> None:
        """Draw the end of the first episodes of rows, which is over."""
        ended = sorted(self.running.intersection(rows))
        if ended:
            self._draw(ended)
            self.running.difference_update(ended)

    def _draw(self, rows: Sequence[int]) -> None:
        images = self.env.render(rows)
        if images is None:  # the environment draws nothing
            self.running = set()
            return
        for row, image in zip(rows, shrunk(images, self.settings.size), strict=True):
            self.frames[row].append(image)


def shrunk(images: Tensor, size: int) -> Tensor:
    """Images [B, 3, H, W] uint8 whose longer side has at most `size` pixels."""
    height, width = images.shape[-2:]
    scale = size / max(height, width)
    if scale >= 1:
        return images
    shape = (max(1, round(height * scale)), max(1, round(width * scale)))
    smaller = interpolate(images.float(), shape, mode="bilinear", antialias=True)
    return smaller.round().clamp(0, 255).to(torch.uint8)


def videos_of(frames: Sequence[Sequence[Tensor]], fps: float) -> Videos | None:
    """The videos of all rows, from the frames of each; None if no row was drawn."""
    images = [image for row in frames for image in row]
    if not images:
        return None
    offsets = torch.tensor([0, *[len(row) for row in frames]]).cumsum(0)
    return Videos(frames=torch.stack(images), offsets=offsets, fps=fps)
