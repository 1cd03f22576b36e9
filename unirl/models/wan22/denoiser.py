"""The transformers of Wan 2.2 as velocity fields. Wan 2025 (arXiv:2503.20314)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.models.wan21.denoiser import FIRST_FRAME, WanDenoiser
from unirl.types.conditions import Conditions, LatentCondition

FINEST_LEVEL = 1e-3
"""The lowest training level of a flow, below which no division by it."""


class ExpertsDenoiser(WanDenoiser):
    """One forward of the experts that the rows' levels belong to."""

    def __init__(self, experts: Any, timestep_scale: float, multiple: int) -> None:
        """
        Args:
            multiple: of the rows that an expert is run on.
        """
        super().__init__(experts, timestep_scale)
        self.multiple = multiple

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B]."""
        return self._velocity(x, sigma, conditions, run_all=False)

    def velocity_by_all(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """The same from a forward that runs both experts."""
        return self._velocity(x, sigma, conditions, run_all=True)

    def _velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions, run_all: bool) -> Tensor:
        inputs = self.inputs(x, sigma, conditions)
        v: Tensor = self.transformer(sigma, inputs, multiple=self.multiple, run_all=run_all)
        return v.float()

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.transformer.transformer.patch_embedding.weight.dtype
        return found


class FirstFrameDenoiser(WanDenoiser):
    """The 5B model: a first frame that is shown stands in the video itself, at level 0, with tokens that say so.

    The velocity there is that of the straight path from the noise to the frame, (x - frame) / sigma, so that any
    solver ends in the frame and a forward-process loss is 0 at it. It depends on no weight: of a log-ratio, which is
    a mean over latent elements, the first latent frame's share is 0.
    """

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, h, w] fp32 at x [B, C, F, h, w] and sigma [B]; `image` [B, C, 1, h, w] where one is shown."""
        shown = conditions.get(FIRST_FRAME)
        if not isinstance(shown, LatentCondition):
            return super().velocity(x, sigma, conditions)
        frame = shown.latents.to(x)
        inputs = self.inputs(torch.cat([frame, x[:, :, 1:]], dim=2), sigma, {"text": conditions["text"]})
        inputs["timestep"] = self._timesteps(x, sigma)
        v: Tensor = self.transformer(**inputs, return_dict=False)[0]
        level = sigma.clamp(min=FINEST_LEVEL).view(-1, 1, 1, 1, 1)
        return torch.cat([(x[:, :, :1] - frame) / level, v[:, :, 1:].float()], dim=2)

    def _timesteps(self, x: Tensor, sigma: Tensor) -> Tensor:
        """[B, L] of each token: 0 in the first latent frame."""
        _, rows, columns = self.transformer.config.patch_size
        tokens = (x.shape[3] // rows) * (x.shape[4] // columns)
        of_frames = (self.timestep_scale * sigma)[:, None].repeat(1, x.shape[2])
        of_frames[:, 0] = 0.0
        return of_frames.repeat_interleave(tokens, dim=1)
