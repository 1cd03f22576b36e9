"""Layers of transformers that read text and latents: rotary embeddings of heads, and embeddings of timesteps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Rotations = tuple[Tensor, Tensor]
"""Cosines and sines [N, 1, d] of the rotary embedding."""
FREQUENCIES = 256
"""Numbers in the sinusoidal embedding of a timestep."""
PERIOD = 10000.0


def rotations(places: Tensor, width: int, theta: float) -> Rotations:
    """The rotary embedding for heads of this width. `places` [N, 1], or [N, width / 2] by frequency, are positions."""
    exponents = torch.arange(0, width, 2, device=places.device) / width
    angles = places.float() * (1.0 / theta**exponents)  # with the rounding of transformers
    angles = torch.cat([angles, angles], dim=1)[:, None]
    return angles.cos(), angles.sin()


def rotated(states: Tensor, by: Rotations) -> Tensor:
    """Queries or keys [N, H, d], rotated."""
    cosines, sines = by
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


def sinusoid(values: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, F] of `values` [N] at the frequencies PERIOD^-exponents [F]."""
    angles = values[:, None] * PERIOD**-exponents
    return angles.cos(), angles.sin()


class TimestepEmbedding(nn.Module):
    """The embedding of a timestep: cosines and sines, then two layers."""

    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), activation(), nn.Linear(width, width))

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, D] from timesteps [B]."""
        half = FREQUENCIES // 2
        waves = torch.cat(sinusoid(timesteps.float(), torch.arange(half, device=timesteps.device) / half), dim=1)
        result: Tensor = self.mlp(waves.to(dtype))
        return result
